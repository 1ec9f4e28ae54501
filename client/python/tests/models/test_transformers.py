# SPDX-License-Identifier: Apache-2.0
"""oscar_kv.transformers with small random models of each family, against the same model's own cache."""

import os
import random
import sys
import unittest
import warnings
import weakref
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from daemon import Daemon  # noqa: E402

from oscar_kv import ConnectionLostError  # noqa: E402
from oscar_kv.transformers import Worker, rope_digest, weights_digest  # noqa: E402

SEED = int(os.environ.get("OSCAR_TEST_SEED", random.randrange(1 << 32)))

# Logits of these models have a deviation of about one. Dense pages round K and V to BF16, 8 bits of mantissa, in every
# layer.
DENSE_TOLERANCE = 0.05

VOCABULARY = 300
HEAD_DIMS = (64, 128, 256)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

transformers.logging.set_verbosity_error()


def make_model(kind, dtype=torch.float32, **options):
    """A model whose attention is far from uniform, and whose K has a bias or a norm, where its family has one."""
    torch.manual_seed(SEED)
    config = kind(**{**SHAPE, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "lm_head.weight")):
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            if name.endswith("proj.bias"):
                parameter.normal_(0, 1)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype)


def random_ids(rows, columns):
    return torch.randint(1, VOCABULARY, (rows, columns))


class Families(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        print(f"seed {SEED}", file=sys.stderr)
        cls.daemon = cls.enterClassContext(Daemon("512M"))

    def setUp(self):
        self.enterContext(torch.no_grad())

    def assert_serves(self, model, tolerance=DENSE_TOLERANCE):
        """Prefill, decode and a second worker's hit give the logits of the model's own cache."""
        ids = random_ids(1, 200)
        expected = model(ids).logits
        with Worker(model, socket=self.daemon.socket) as worker:
            for hit in (0, 192):
                cache = worker.cache(ids[:, :199])
                self.assertEqual(cache.hit_tokens, [hit])
                found = []
                for end in (150, 199, 200):
                    begin = cache.get_seq_length()
                    if begin < end:
                        found.append(model(ids[:, begin:end], cache=cache).logits)
                found = torch.cat(found, dim=1)
                self.assertLess((found - expected[:, -found.shape[1] :]).abs().max().item(), tolerance)
                wait_sealed(cache, 192)

    def test_llama(self):
        self.assert_serves(make_model(LlamaConfig, head_dim=64))

    def test_llama_bf16(self):
        self.assert_serves(make_model(LlamaConfig, torch.bfloat16, head_dim=64), 4 * DENSE_TOLERANCE)

    def test_llama_fp16(self):
        self.assert_serves(make_model(LlamaConfig, torch.float16, head_dim=64))

    def test_qwen2_with_k_biases(self):
        for head_dim in HEAD_DIMS:
            with self.subTest(head_dim=head_dim):
                self.assert_serves(make_model(Qwen2Config, hidden_size=SHAPE["num_attention_heads"] * head_dim))

    def test_qwen3_with_qk_norm(self):
        for head_dim in HEAD_DIMS:
            with self.subTest(head_dim=head_dim):
                self.assert_serves(make_model(Qwen3Config, head_dim=head_dim))

    def test_llama_with_heads_of_256(self):
        self.assert_serves(make_model(LlamaConfig, head_dim=256))

    def test_other_models_are_refused(self):
        sliding = make_model(
            Qwen2Config, hidden_size=384, use_sliding_window=True, sliding_window=64, max_window_layers=1
        )
        with self.assertRaisesRegex(ValueError, "sliding"):
            Worker(sliding, socket=self.daemon.socket)
        scaled = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        with self.assertRaisesRegex(ValueError, "dynamic"):
            rope_digest(scaled)
        with self.assertRaisesRegex(ValueError, "float64"):
            Worker(make_model(LlamaConfig, head_dim=64), socket=self.daemon.socket, dtype=torch.float64)


def wait_sealed(cache, tokens):
    """Waits until these tokens of the first sequence can be found. Recent ones stay BF16 while the cache is open."""
    sequence = cache.sequences[0]
    while sequence.info().sealed_tokens < tokens:
        sequence.advance([])


class Generate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = cls.enterClassContext(Daemon("512M"))
        cls.model = make_model(LlamaConfig, head_dim=64)
        cls.worker = cls.enterClassContext(Worker(cls.model, socket=cls.daemon.socket))

    def setUp(self):
        self.enterContext(torch.no_grad())

    def cache(self, ids, mask=None):
        """A cache that is open until the test ends: what it stores stays BF16 in its window, for others too."""
        return self.enterContext(self.worker.cache(ids, mask))

    def generate(self, ids, tokens=20, **options):
        return self.model.generate(
            ids, do_sample=False, max_new_tokens=tokens, return_dict_in_generate=True, output_logits=True, **options
        )

    def assert_same(self, found, expected):
        """The same tokens, unless the two best of the expected logits lie within rounding at the first that differs."""
        for row in range(found.sequences.shape[0]):
            prompt = found.sequences.shape[1] - len(found.logits)
            differ = (found.sequences[row] != expected.sequences[row]).nonzero()
            last = int(differ[0]) - prompt if len(differ) else len(found.logits) - 1
            for step in range(last + 1):
                error = (found.logits[step][row] - expected.logits[step][row]).abs().max().item()
                self.assertLess(error, DENSE_TOLERANCE, f"row {row}, step {step}")
            if len(differ):
                best = expected.logits[last][row].topk(2).values
                self.assertLess((best[0] - best[1]).item(), 2 * DENSE_TOLERANCE)

    def test_generate_is_that_of_the_models_own_cache(self):
        ids = random_ids(1, 150)
        expected = self.generate(ids)
        for hit in (0, 128):
            cache = self.cache(ids)
            self.assertEqual(cache.hit_tokens, [hit])
            self.assert_same(self.generate(ids, cache=cache), expected)
            self.assertEqual(cache.get_seq_length(), 169)
            wait_sealed(cache, 128)

    def test_a_hit_skips_the_prefill_of_cached_tokens(self):
        ids = random_ids(1, 150)
        rows = []
        hook = self.model.base_model.layers[0].register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
        for _ in range(2):
            with self.worker.cache(ids) as cache:
                self.generate(ids, 2, cache=cache)
                wait_sealed(cache, 128)
        hook.remove()
        self.assertEqual(rows, [150, 1, 22, 1])

    def test_a_prompt_that_is_cached_whole_computes_its_last_token(self):
        ids = random_ids(1, 128)
        expected = self.generate(ids)
        for skipped in (0, 127):
            cache = self.cache(ids)
            self.assertEqual(cache.get_seq_length(), skipped)
            self.assert_same(self.generate(ids, cache=cache), expected)
            wait_sealed(cache, 128)

    def test_prompts_of_a_padded_batch_share_prefixes(self):
        shared = random_ids(1, 130)
        prompts = [
            torch.cat([shared, random_ids(1, 20)], 1)[0],
            torch.cat([shared, random_ids(1, 5)], 1)[0],
            random_ids(1, 9)[0],
        ]
        ids = torch.zeros(3, 150, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, 150 - len(prompt) :] = prompt
            mask[row, 150 - len(prompt) :] = 1
        expected = self.generate(ids, attention_mask=mask)
        for hits in ([0, 0, 0], [128, 128, 0]):
            cache = self.cache(ids, mask)
            self.assertEqual(cache.hit_tokens, hits)
            self.assert_same(self.generate(ids, attention_mask=mask, cache=cache), expected)
            wait_sealed(cache, 128)
        self.assertEqual(
            self.cache(ids[:2], mask[:2]).get_seq_length(), 128
        )  # row 0 has no padding, row 1 is cached up to column 143

    def test_a_second_turn_goes_on_in_the_same_cache(self):
        ids = random_ids(1, 100)
        with self.worker.cache(ids) as cache:
            first = self.generate(ids, 10, cache=cache).sequences
            longer = torch.cat([first, random_ids(1, 15)], 1)
            self.assert_same(self.generate(longer, cache=cache), self.generate(longer))

    def test_beams_fork_and_chunks_of_a_prefill_follow_each_other(self):
        ids = random_ids(1, 150)
        for options in ({"num_beams": 3, "output_scores": True}, {"prefill_chunk_size": 40}):
            expected = self.generate(ids, **options)
            found = self.generate(ids, cache=self.cache(ids), **options)
            if "num_beams" in options:
                self.assertLess(
                    (found.sequences_scores - expected.sequences_scores).abs().max().item(), DENSE_TOLERANCE
                )
            else:
                self.assert_same(found, expected)

    def test_a_dense_tail_is_computed_again(self):
        ids = random_ids(1, 700)
        with self.worker.cache(ids) as cache:
            self.generate(ids, 1, cache=cache)
            wait_sealed(cache, 640)
        hits = []
        for dense_tail in (False, True):
            with self.worker.cache(ids, dense_tail=dense_tail) as cache:
                hits += cache.hit_tokens
                self.generate(ids, 2, cache=cache)
        self.assertEqual(hits[0], 640)
        self.assertLessEqual(hits[1], 640)

    def test_history_is_packed_while_the_model_goes_on(self):
        ids = random_ids(1, 700)
        with self.worker.cache(ids) as cache:
            self.model(ids, cache=cache)
            cache.settle()
            self.assertEqual(cache.info()[0].packed_tokens, 320)  # 700 - 256, whole pages, less the sink
            logits = self.model(random_ids(1, 1), cache=cache).logits
            self.assertTrue(torch.isfinite(logits).all())

    def test_a_failed_forward_pass_can_be_repeated(self):
        ids = random_ids(1, 90)

        def fail(*_):
            raise KeyboardInterrupt

        with self.worker.cache(ids) as cache:
            hook = self.model.base_model.layers[1].register_forward_pre_hook(fail)
            with self.assertRaises(KeyboardInterrupt):
                self.model(ids, cache=cache)
            hook.remove()
            self.assertEqual(cache.get_seq_length(), 0)
            self.assert_same(self.generate(ids, cache=cache), self.generate(ids))

    def test_what_does_not_fit_the_cache_is_refused(self):
        ids = random_ids(1, 20)
        other = ids.clone()
        other[0, 3] = ids[0, 3] % (VOCABULARY - 1) + 1
        mask = torch.ones_like(ids)
        with self.worker.cache(ids) as cache:
            with self.assertRaisesRegex(ValueError, "other tokens"):
                self.model(other, cache=cache)
            with self.assertRaisesRegex(ValueError, "attention_mask"):
                self.model(ids, attention_mask=mask.index_fill(1, torch.tensor([0]), 0), cache=cache)
            with self.assertRaisesRegex(ValueError, "position_ids"):
                self.model(ids, position_ids=torch.arange(1, 21)[None], cache=cache)
            with self.assertRaisesRegex(ValueError, "input_ids"):
                self.model(inputs_embeds=self.model.get_input_embeddings()(ids), cache=cache)
            with self.assertRaises(NotImplementedError):
                cache.crop(1)
            with torch.enable_grad(), self.assertRaisesRegex(ValueError, "inference"):
                self.model(ids, cache=cache)
            stranger = make_model(LlamaConfig, head_dim=64)
            with self.assertRaises(RuntimeError):
                stranger(ids, cache=cache)
        with self.assertRaisesRegex(ValueError, "left"):
            self.worker.cache(ids, mask.index_fill(1, torch.tensor([7]), 0))

    def test_a_cache_that_nobody_holds_gives_its_pages_back(self):
        ids = random_ids(1, 100)
        cache = self.worker.cache(ids)
        self.model(ids, cache=cache)
        gone = weakref.ref(cache.sequences[0])
        del cache
        self.assertIsNone(gone())

    def test_without_its_cache_the_model_is_as_before(self):
        ids = random_ids(1, 50)
        plain = make_model(LlamaConfig, head_dim=64)
        torch.testing.assert_close(self.model(ids).logits, plain(ids).logits)
        torch.testing.assert_close(self.model(ids, cache=DynamicCache()).logits, plain(ids).logits)

    def test_a_closed_worker_gives_the_model_its_attention_back(self):
        model = make_model(LlamaConfig, head_dim=64)
        before = model.config._attn_implementation
        Worker(model, socket=self.daemon.socket).close()
        self.assertEqual(model.config._attn_implementation, before)
        with self.assertRaises(ConnectionLostError):
            Worker(model, socket=self.daemon.socket + ".none")
        self.assertEqual(model.config._attn_implementation, before)


class Identity(unittest.TestCase):
    def test_digests_name_weights_type_and_rope(self):
        model = make_model(LlamaConfig, head_dim=64)
        digest = weights_digest(model)
        self.assertEqual(digest, weights_digest(make_model(LlamaConfig, head_dim=64)))
        self.assertNotEqual(digest, weights_digest(make_model(LlamaConfig, torch.bfloat16, head_dim=64)))
        changed = make_model(LlamaConfig, head_dim=64)
        with torch.no_grad():
            changed.base_model.layers[2].mlp.up_proj.weight[0, 0] += 1
        self.assertNotEqual(digest, weights_digest(changed))
        self.assertNotEqual(weights_digest(model, __file__), digest)
        self.assertEqual(weights_digest(model, __file__), weights_digest(changed, [__file__]))
        config = model.config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = LlamaConfig(**SHAPE, head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        self.assertNotEqual(rope_digest(config), rope_digest(other))


if __name__ == "__main__":
    unittest.main()
