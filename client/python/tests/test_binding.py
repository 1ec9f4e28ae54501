# SPDX-License-Identifier: Apache-2.0
"""The binding against a real oscard on the host backend, with numpy alone."""

import gc
import os
import pickle
import random
import sys
import time
import types
import unittest
import zlib

import numpy as np
from daemon import Daemon
from reference import attention, random_rows

import oscar_kv
from oscar_kv import Batch, BatchEntry, Client, ErrorCode, Geometry, Model, Query, Sequence, Stream, bf16_values

SHAPE = Geometry(layers=2, query_heads=8, kv_heads=2, head_dim=64)
IDENTITY = {"weights_digest": b"w" * 32, "rope_digest": b"r" * 32}

# K, V and outputs are rounded to BF16 (8 bits of mantissa) before and after the sums; outputs are of size one.
DENSE_TOLERANCE = 0.02

SEED = int(os.environ.get("OSCAR_TEST_SEED", random.randrange(1 << 32)))


class Binding(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        print(f"seed {SEED}", file=sys.stderr)
        cls.daemon = cls.enterClassContext(Daemon())

    def setUp(self):
        self.random = np.random.default_rng([SEED, zlib.crc32(self.id().encode())])
        self.client = self.enterContext(Client(self.daemon.socket, group="tests", timeout_ms=20000))
        self.model = Model(self.client, SHAPE, **IDENTITY)

    def prompt(self, count):
        return self.random.integers(0, 1 << 31, count).tolist()

    def tensors(self, tokens):
        """Random bits and values of K and V, a layer."""
        return [
            (random_rows(self.random, tokens, SHAPE.kv_heads, 64), random_rows(self.random, tokens, SHAPE.kv_heads, 64))
            for _ in range(SHAPE.layers)
        ]

    def computed(self, prompt, tensors, **options):
        """A sequence whose missing tokens have been stored and committed."""
        seq = Sequence(self.model, prompt, **options)
        first = seq.info().hit_tokens
        seq.reserve(len(prompt) - first)
        for layer, ((k, _), (v, _)) in enumerate(tensors):
            seq.store(layer, first, k[first:], v[first:])
        seq.advance(prompt[first:])
        return seq

    def sealed(self, seq):
        """The sequence, once its full pages have been published."""
        full = seq.info().committed_tokens // 64 * 64
        deadline = time.monotonic() + 20
        while seq.info().sealed_tokens < full:
            self.assertLess(time.monotonic(), deadline, "its pages are not sealed in time")
            seq.advance([])  # asks the daemon
        return seq

    def assert_attends(self, seq, tensors, tokens, rows=3, tolerance=DENSE_TOLERANCE):
        for layer, ((_, k), (_, v)) in enumerate(tensors):
            q, q_values = random_rows(self.random, rows, SHAPE.query_heads, 64)
            out, lse = np.full_like(q, 0x7FC0), np.full((rows, SHAPE.query_heads), np.nan, np.float32)
            self.model.attend(layer, [Query(seq, q, out, tokens=tokens, lse=lse)])
            expected, expected_lse = attention(q_values, k[:tokens], v[:tokens])
            np.testing.assert_allclose(bf16_values(out), expected, atol=tolerance, rtol=0)
            np.testing.assert_allclose(lse, expected_lse, atol=tolerance, rtol=0)

    def test_attention_equals_float64(self):
        prompt, tensors = self.prompt(200), self.tensors(200)
        seq = self.computed(prompt, tensors)
        for tokens in (200, 64, 3):
            self.assert_attends(seq, tensors, tokens)

    def test_a_second_process_finds_the_prefix(self):
        prompt, tensors = self.prompt(200), self.tensors(200)
        self.sealed(self.computed(prompt, tensors)).close()
        printed = self.daemon.run_worker(
            "from oscar_kv import *\n"
            "from test_binding import SHAPE, IDENTITY\n"
            f"prompt = {prompt}\n"
            "seq = Sequence(Model(Client(), SHAPE, **IDENTITY), prompt)\n"
            "print(seq.info().hit_tokens)\n"
        )
        self.assertEqual(printed.split(), ["192"])

    def test_any_strides_are_read_in_place(self):
        prompt, tensors = self.prompt(70), self.tensors(70)
        seq = Sequence(self.model, prompt)
        seq.reserve(70)
        for layer, ((k, _), (v, _)) in enumerate(tensors):
            fused = np.concatenate([k.transpose(1, 0, 2), v.transpose(1, 0, 2)], axis=2)  # [head][token][k, v]
            seq.store(layer, 0, fused[..., :64].transpose(1, 0, 2), fused[..., 64:].transpose(1, 0, 2))
        self.assert_attends(seq, tensors, 70)

    def test_rows_may_be_written_again_until_they_are_committed(self):
        prompt, tensors = self.prompt(10), self.tensors(10)
        seq = Sequence(self.model, prompt)
        seq.reserve(10)
        for _ in range(2):
            for layer in range(SHAPE.layers):
                noise = random_rows(self.random, 10, SHAPE.kv_heads, 64)[0]
                seq.store(layer, 0, noise, noise)
            for layer, ((k, _), (v, _)) in enumerate(tensors):
                seq.store(layer, 0, k, v)
        self.assert_attends(seq, tensors, 10)
        seq.advance(prompt)
        seq.store(0, 0, noise, noise)
        self.assert_attends(seq, tensors, 10)

    def test_a_fork_goes_its_own_way(self):
        prompt, tensors = self.prompt(100), self.tensors(101)
        seq = self.computed(prompt, [((k[:100], kv), (v[:100], vv)) for (k, kv), (v, vv) in tensors])
        branch = seq.fork()
        branch.reserve(1)
        for layer, ((k, _), (v, _)) in enumerate(tensors):
            branch.store(layer, 100, k[100:], v[100:])
        branch.advance([7])
        self.assertEqual((branch.info().committed_tokens, seq.info().committed_tokens), (101, 100))
        self.assert_attends(branch, tensors, 101)
        self.assert_attends(seq, tensors, 100)

    def test_a_batch_of_ragged_sequences(self):
        lengths, new = (70, 5, 130), 2
        work = [(self.prompt(n), self.tensors(n + new)) for n in lengths]
        seqs = [
            self.computed(prompt, [((k[:n], kv), (v[:n], vv)) for (k, kv), (v, vv) in tensors])
            for n, (prompt, tensors) in zip(lengths, work)
        ]
        for seq in seqs:
            seq.reserve(new)
        with Batch(self.model, max_seqs=3, max_rows=new, max_tokens=1000) as batch:
            batch.set([BatchEntry(seq, new) for seq in seqs])
            for layer in range(SHAPE.layers):
                k, v = (np.concatenate([tensors[layer][side][0][-new:] for _, tensors in work]) for side in (0, 1))
                batch.store(layer, k, v)
                q, q_values = random_rows(self.random, new * 3, SHAPE.query_heads, 64)
                out = np.full_like(q, 0x7FC0)
                batch.attend(layer, q, out)
                for i, (_, tensors) in enumerate(work):
                    rows = slice(i * new, (i + 1) * new)
                    expected, _ = attention(q_values[rows], tensors[layer][0][1], tensors[layer][1][1])
                    np.testing.assert_allclose(bf16_values(out[rows]), expected, atol=DENSE_TOLERANCE, rtol=0)
            seqs[0].advance([1, 2])
            with self.assertRaises(oscar_kv.StateError):  # overtaken
                batch.store(0, k, v)

    def test_parts_merge(self):
        prompt, tensors = self.prompt(100), self.tensors(100)
        seq = self.computed(prompt, tensors)
        (_, k), (_, v) = tensors[0]
        q, q_values = random_rows(self.random, 1, SHAPE.query_heads, 64)
        out, lse = np.empty_like(q), np.empty((1, SHAPE.query_heads), np.float32)
        self.model.attend(0, [Query(seq, q, out, tokens=40, lse=lse)])
        rest, rest_lse = attention(q_values, k[40:], v[40:])
        self.model.merge(out, lse, oscar_kv.bf16_bits(rest), rest_lse.astype(np.float32))
        np.testing.assert_allclose(bf16_values(out), attention(q_values, k, v)[0], atol=DENSE_TOLERANCE, rtol=0)

    def test_a_lease_is_adopted_by_its_secret(self):
        prompt = self.prompt(130)
        self.sealed(self.computed(prompt, self.tensors(130))).close()
        self.assertEqual(self.model.probe(prompt).hit_tokens, 128)
        with self.model.lease(prompt) as lease, Client(self.daemon.socket, group="tests") as other:
            self.assertEqual(lease.hit_tokens, 128)
            with Model(other, SHAPE, **IDENTITY).adopt_lease(lease.secret()) as adopted:
                self.assertEqual(adopted.hit_tokens, 128)
        with self.assertRaises(oscar_kv.OscarError) as caught:
            self.model.adopt_lease(bytes(16))
        self.assertIs(caught.exception.code, ErrorCode.NOT_FOUND)

    def test_work_on_an_asynchronous_stream(self):
        prompt, tensors = self.prompt(70), self.tensors(70)
        (_, k), (_, v) = tensors[0]
        q, q_values = random_rows(self.random, 2, SHAPE.query_heads, 64)
        out = np.empty_like(q)
        with Stream(self.client, asynchronous=True) as stream:
            seq = Sequence(self.model, prompt)
            seq.reserve(70)
            seq.store(0, 0, tensors[0][0][0].copy(), tensors[0][1][0].copy(), stream=stream)
            self.model.attend(0, [Query(seq, q, out, tokens=70)], stream=stream)
            stream.wait()
        np.testing.assert_allclose(bf16_values(out), attention(q_values, k, v)[0], atol=DENSE_TOLERANCE, rtol=0)

    def test_fp16_models_take_float16(self):
        with Model(self.client, Geometry(1, 2, 1, 64, "float16"), **IDENTITY) as model:
            k, v, q = (self.random.standard_normal((9, heads, 64)).astype(np.float16) for heads in (1, 1, 2))
            seq = Sequence(model, [])
            seq.reserve(9)
            seq.store(0, 0, k, v)
            out = np.empty_like(q)
            model.attend(0, [Query(seq, q, out, tokens=9)])
            expected = attention(*(side.astype(np.float64) for side in (q, k, v)))[0]
            np.testing.assert_allclose(out, expected, atol=DENSE_TOLERANCE, rtol=0)
            with self.assertRaisesRegex(oscar_kv.InvalidError, "float32"):
                seq.store(0, 0, k.astype(np.float32), v)

    def test_rotations_are_orthogonal_and_explain_rows(self):
        rotation = self.model.rotation(1, 0, "k")
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(64), atol=1e-5)
        self.assertEqual(len(self.model.info().model_digest), 32)
        seq = Sequence(self.model, [])
        seq.reserve(1)
        bits, values = random_rows(self.random, 1, SHAPE.kv_heads, 64)
        seq.store(1, 0, bits, bits)
        address, _, count = seq.rows(1, 0, 0)
        self.assertGreaterEqual(count, 1)
        import ctypes

        stored = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16)), (64,))
        np.testing.assert_allclose(bf16_values(stored), values[0, 0] @ rotation, atol=0.02)

    def test_errors_are_exceptions_with_code_cause_and_remedy(self):
        seq = Sequence(self.model, [])
        k = np.zeros((4, SHAPE.kv_heads, 64), np.uint16)
        with self.assertRaises(oscar_kv.NoSpaceError) as caught:
            seq.store(0, 0, k, k)
        self.assertIs(caught.exception.code, ErrorCode.NO_SPACE)
        self.assertIn("reserved", caught.exception.cause)
        self.assertIn("close sequences", caught.exception.remedy)
        again = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((again.code, str(again)), (caught.exception.code, str(caught.exception)))
        seq.reserve(4)
        with self.assertRaises(oscar_kv.NotFiniteError):
            seq.store(0, 0, np.full_like(k, 0x7F80), k)
        for bad, text in ((k[0], "shape"), (k[:, :, ::2], "shape"), (k[:, :, ::-1], "contiguous"), ([1], "numpy")):
            with self.assertRaisesRegex(oscar_kv.InvalidError, text):
                seq.store(0, 0, bad, k)
        on_gpu = types.SimpleNamespace(__cuda_array_interface__=k.__array_interface__)
        with self.assertRaisesRegex(oscar_kv.InvalidError, "memory of a GPU"):
            seq.store(0, 0, on_gpu, k)
        k.flags.writeable = False
        with self.assertRaisesRegex(oscar_kv.InvalidError, "read-only"):
            self.model.attend(0, [Query(seq, np.zeros((1, 8, 64), np.uint16), np.broadcast_to(k[:1, :1], (1, 8, 64)))])
        for tokens in ([-1], [1 << 32], ["a"]):
            with self.assertRaises(oscar_kv.InvalidError):
                Sequence(self.model, tokens)
        with self.assertRaises(oscar_kv.InvalidError) as caught:
            Model(self.client, Geometry(2, 7, 2, 64), **IDENTITY)
        self.assertIs(caught.exception.code, ErrorCode.GEOMETRY)
        with self.assertRaises(oscar_kv.InvalidError) as caught:
            Model(self.client, SHAPE, weights_digest=b"", rope_digest=b"r" * 32)
        self.assertIs(caught.exception.code, ErrorCode.IDENTITY)
        with self.assertRaises(oscar_kv.OscarError) as caught:
            Model(self.client, SHAPE, calibration="no such file", **IDENTITY)
        self.assertIs(caught.exception.code, ErrorCode.NOT_FOUND)
        with self.assertRaises(oscar_kv.ConnectionLostError) as caught:
            Client(str(self.daemon.folder / "nobody.sock"))
        self.assertIs(caught.exception.code, ErrorCode.NOT_RUNNING)

    def test_what_is_closed_says_so(self):
        seq = Sequence(self.model, [])
        self.client.close()
        self.client.close()
        for call in (seq.info, self.model.info, self.client.ping, lambda: Sequence(self.model, [])):
            with self.assertRaises(oscar_kv.StateError):
                call()
        seq.close()
        self.assertTrue(seq.closed)

    def test_what_nobody_holds_is_closed(self):
        before = Sequence(self.model, self.prompt(100))
        before.reserve(100)
        del before
        gc.collect()
        with Client(self.daemon.socket) as other:
            self.assertEqual(other.info().backend, "host")
        for _ in range(300):  # more than the budget holds at once
            Sequence(self.model, []).reserve(64)

    def test_a_forked_child_leaves_the_client_alone(self):
        child = os.fork()
        if child == 0:
            try:
                self.client.ping()
            except oscar_kv.StateError:
                self.client.close()
                os._exit(7)
            os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 7)
        self.client.ping()


class Death(unittest.TestCase):
    def test_a_daemon_that_has_gone_is_a_lost_connection(self):
        with Daemon() as daemon:
            client = Client(daemon.socket)
            daemon.kill()
            with self.assertRaises(oscar_kv.ConnectionLostError):
                client.ping()
            client.close()


if __name__ == "__main__":
    unittest.main()
