# SPDX-License-Identifier: Apache-2.0
"""Tests of the capture program that need no model: python3 -m unittest, in this folder."""

import json
import struct
import tempfile
import unittest
from pathlib import Path

import numpy as np

import safetensors_io
from bpe import Tokenizer, split_words
from capture import choose_layers
from errors import CaptureError
from llama import Shape, attend, halves_order, rope_tables, rotate


class Bf16(unittest.TestCase):
    def test_rounds_to_nearest_with_ties_to_even(self):
        values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0], np.float32)
        self.assertEqual(safetensors_io.to_bf16(values).tolist(), [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000])

    def test_refuses_what_is_not_finite(self):
        for bad in (np.nan, np.inf):
            with self.assertRaises(CaptureError):
                safetensors_io.to_bf16(np.array([1, bad], np.float32))


class Safetensors(unittest.TestCase):
    def test_file_holds_what_was_written(self):
        tensors = {
            "a": ("BF16", np.arange(6, dtype=np.uint16).reshape(2, 3)),
            "tokens": ("I64", np.array([7, -1])),
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file.safetensors"
            safetensors_io.write(path, tensors, {"model": "none"})
            self.assertEqual([entry.name for entry in Path(folder).iterdir()], ["file.safetensors"])
            raw = path.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        self.assertEqual(length % 8, 0)
        self.assertEqual(header["a"], {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]})
        self.assertEqual(header["tokens"], {"dtype": "I64", "shape": [2], "data_offsets": [12, 28]})
        self.assertEqual(header["__metadata__"], {"model": "none"})
        self.assertEqual(raw[8 + length :], struct.pack("<6H2q", 0, 1, 2, 3, 4, 5, 7, -1))


class Words(unittest.TestCase):
    def test_splits_as_the_model_was_trained(self):
        cases = {
            "I'll go, now": ["I", "'ll", " go", ",", " now"],
            "in 1998.": ["in", " ", "1", "9", "9", "8", "."],
            "a  b\n\n    c": ["a", " ", " b", "\n\n   ", " c"],
            "x\ty\n": ["x", "\t", "y", "\n"],
            "end  ": ["end", "  "],
            "$h{é} —": ["$", "h", "{", "é", "}", " —"],
        }
        for text, words in cases.items():
            with self.subTest(text=text):
                self.assertEqual(split_words(text), words)


class Bpe(unittest.TestCase):
    FIELDS = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "Ġ", "ab", "ba", "Ġab"],
        "tokenizer.ggml.merges": ["b a", "a b", "Ġ ab"],
    }

    def test_merges_the_pair_learned_first(self):
        self.assertEqual(Tokenizer(self.FIELDS.get).encode("aba ab"), [0, 4, 5])

    def test_begins_with_the_token_that_the_file_asks_for(self):
        fields = {**self.FIELDS, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 9}
        self.assertEqual(Tokenizer(fields.get).encode("a"), [9, 0])

    def test_refuses_a_word_outside_the_vocabulary(self):
        with self.assertRaisesRegex(CaptureError, "'xa'"):
            Tokenizer(self.FIELDS.get).encode("xa")

    def test_refuses_an_unknown_pre_tokeniser(self):
        with self.assertRaisesRegex(CaptureError, "qwen2"):
            Tokenizer({**self.FIELDS, "tokenizer.ggml.pre": "qwen2"}.get)


class Model(unittest.TestCase):
    def test_halves_order_moves_pairs_apart(self):
        interleaved = np.arange(12, dtype=np.float32).reshape(12, 1)  # two heads of six dims
        self.assertEqual(halves_order(interleaved, 2)[:, 0].tolist(), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11])

    def test_logits_depend_on_the_distance_only(self):
        cos, sin = rope_tables(9, 8, 10000.0)
        rows = np.random.default_rng(1).standard_normal((2, 1, 1, 8), dtype=np.float32)
        q, k = (rotate(np.repeat(row, 9, axis=0), cos, sin)[:, 0] for row in rows)
        logits = q @ k.T
        np.testing.assert_allclose(np.diagonal(logits, 2), logits[0, 2], rtol=1e-5)

    def test_attention_sees_no_later_token(self):
        q, k, v = np.random.default_rng(2).standard_normal((3, 600, 2, 4), dtype=np.float32)
        whole = attend(q, k, v)
        np.testing.assert_allclose(whole[0], v[0].reshape(-1), rtol=1e-6)
        np.testing.assert_allclose(attend(q[:550], k[:550], v[:550]), whole[:550], rtol=1e-5, atol=1e-6)

    def test_refuses_another_architecture(self):
        with self.assertRaisesRegex(CaptureError, "qwen2"):
            Shape.of({"general.architecture": "qwen2"}.get)


class Layers(unittest.TestCase):
    def test_names_and_numbers(self):
        self.assertEqual(choose_layers("last,first,middle", 30), [0, 15, 29])
        self.assertEqual(choose_layers("7, 3,7", 30), [3, 7])
        self.assertEqual(choose_layers("all", 3), [0, 1, 2])

    def test_refuses_what_is_no_layer(self):
        for selection in ("30", "-1", "", "0,,1", "end"):
            with self.subTest(selection=selection), self.assertRaises(CaptureError):
                choose_layers(selection, 30)


if __name__ == "__main__":
    unittest.main()
