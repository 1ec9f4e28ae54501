# SPDX-License-Identifier: Apache-2.0
"""The binding with a daemon of the cuda backend: where tensors lie, and the stream that work goes to.
OSCAR_CUDA_EMULATION names the driver library that stands for a GPU; FAKE_CUDA_DELAY_US makes its streams late, so
that what is not in order with a stream's other work fails.
"""

import os
import random
import sys
import unittest
from unittest import mock

import numpy as np
from daemon import Daemon
from fake_torch import Driver, Tensor, torch
from reference import attention, random_rows

import oscar_kv
from oscar_kv import Client, Geometry, Model, Query, Sequence, bf16_values

DRIVER = os.environ.get("OSCAR_CUDA_EMULATION")
SEED = int(os.environ.get("OSCAR_TEST_SEED", random.randrange(1 << 32)))
SHAPE = Geometry(layers=1, query_heads=4, kv_heads=2, head_dim=64)
TOLERANCE = 0.02  # as in test_binding
TOKENS = 70
OTHER, OURS = 0, 1  # as torch numbers the driver's second and first GPU; the daemon takes its first


@unittest.skipUnless(DRIVER, "no CUDA in this build")
class OnGpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        print(f"seed {SEED}", file=sys.stderr)
        cls.enterClassContext(mock.patch.dict(os.environ, OSCAR_CUDA_DRIVER=DRIVER, FAKE_CUDA_DELAY_US="300"))
        cls.daemon = cls.enterClassContext(Daemon(backend="cuda"))
        cls.driver = Driver(DRIVER)

    def setUp(self):
        self.random = np.random.default_rng(SEED)
        self.torch = self.see(1, 0)
        self.client = self.enterContext(Client(self.daemon.socket, timeout_ms=20000))
        self.model = Model(self.client, SHAPE, weights_digest=b"w" * 32, rope_digest=b"r" * 32)
        self.sequence = Sequence(self.model, [])
        self.sequence.reserve(TOKENS)

    def see(self, *devices):
        """torch as it is where these GPUs are visible."""
        module = torch(self.driver, devices)
        self.enterContext(mock.patch.dict(sys.modules, torch=module))
        return module

    def empty(self, *shape, dtype="bfloat16", device=OURS):
        return Tensor(self.driver, shape, dtype, device)

    def rows(self, tokens, heads):
        """A tensor of random rows, and their values."""
        bits, values = random_rows(self.random, tokens, heads, 64)
        tensor = self.empty(tokens, heads, 64)
        tensor.array[:] = bits
        return tensor, values

    def test_the_device_is_known_by_its_uuid(self):
        self.assertEqual(self.client.info().backend, "cuda")
        self.assertEqual(self.client.gpu, f"GPU-{self.driver.uuid(0)}")
        self.assertEqual(self.client.gpu, oscar_kv.tensors.torch_gpu(OURS))

    def test_calls_without_a_stream_are_done_when_they_return(self):
        (k, k_values), (v, v_values), (q, q_values) = (self.rows(n, heads) for n, heads in ((70, 2), (70, 2), (3, 4)))
        self.sequence.store(0, 0, k, v)
        out, lse = self.empty(3, 4, 64), self.empty(3, 4, dtype="float32")
        self.model.attend(0, [Query(self.sequence, q, out, tokens=TOKENS, lse=lse)])
        expected, expected_lse = attention(q_values, k_values, v_values)
        np.testing.assert_allclose(bf16_values(out.array), expected, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(lse.array, expected_lse, atol=TOLERANCE, rtol=0)

    def test_work_is_in_order_with_that_of_torchs_current_stream(self):
        for native in (self.driver.stream(), 0):  # 0: CUDA's default stream, as torch writes it
            with self.subTest(native=native):
                self.torch.streams[OURS] = native
                stream = self.client.torch_stream()
                self.assertIs(self.client.torch_stream(), stream)
                filled = [self.rows(n, heads) for n, heads in ((70, 2), (70, 2), (3, 4))]
                late = [self.empty(*tensor.shape) for tensor, _ in filled]
                out, copy = self.empty(3, 4, 64), self.empty(3, 4, 64)
                for to, (tensor, _) in zip(late, filled):
                    self.driver.copy(to.data_ptr(), tensor.data_ptr(), tensor.array.nbytes, native)
                k, v, q = late
                self.sequence.store(0, 0, k, v, stream=stream)
                self.model.attend(0, [Query(self.sequence, q, out, tokens=TOKENS)], stream=stream)
                self.driver.copy(copy.data_ptr(), out.data_ptr(), out.array.nbytes, native)
                self.driver.wait(native)
                (_, k_values), (_, v_values), (_, q_values) = filled
                expected, _ = attention(q_values, k_values, v_values)
                np.testing.assert_allclose(bf16_values(copy.array), expected, atol=TOLERANCE, rtol=0)
                stream.wait()

    def test_a_current_stream_is_one_stream_of_the_client(self):
        self.torch.streams[OURS] = self.driver.stream()
        first = self.client.torch_stream()
        self.torch.streams[OTHER] = self.driver.stream()  # of another GPU: not asked for
        self.assertIs(self.client.torch_stream(), first)
        self.torch.streams[OURS] = self.driver.stream()
        self.assertIsNot(self.client.torch_stream(), first)

    def test_a_gpu_that_torch_does_not_see_is_named(self):
        self.see(1)
        with self.assertRaisesRegex(oscar_kv.InvalidError, f"torch has no {self.client.gpu}"):
            self.client.torch_stream()

    def test_tensors_elsewhere_are_refused(self):
        good, _ = self.rows(4, 2)
        host = good.array.copy()
        other = self.empty(4, 2, 64, device=OTHER)
        cases = (
            (host, f"k is in memory of the host, the daemon's pages are in that of {self.client.gpu}"),
            (
                other,
                f"k is in memory of GPU-{self.driver.uuid(1)}, the daemon's pages are in that of {self.client.gpu}",
            ),
        )
        for bad, text in cases:
            with self.assertRaisesRegex(oscar_kv.InvalidError, text):
                self.sequence.store(0, 0, bad, good)
            with self.assertRaisesRegex(oscar_kv.InvalidError, text.replace("k is", "v is")):
                self.sequence.store(0, 0, good, bad)
        q, _ = self.rows(1, 4)
        self.sequence.store(0, 0, good, good)
        query = Query(self.sequence, q, self.empty(1, 4, 64), tokens=4, lse=np.empty((1, 4), np.float32))
        with self.assertRaisesRegex(oscar_kv.InvalidError, "lse is in memory of the host"):
            self.model.attend(0, [query])


@unittest.skipUnless(DRIVER, "no CUDA in this build")
class OnHost(unittest.TestCase):
    def test_a_cuda_tensor_is_refused_and_there_is_no_stream_of_torch(self):
        driver = Driver(DRIVER)
        self.enterContext(mock.patch.dict(sys.modules, torch=torch(driver, [0])))
        with Daemon() as daemon, Client(daemon.socket, timeout_ms=20000) as client:
            self.assertIsNone(client.gpu)
            sequence = Sequence(Model(client, SHAPE, weights_digest=b"w" * 32, rope_digest=b"r" * 32), [])
            sequence.reserve(4)
            tensor = Tensor(driver, (4, 2, 64), "bfloat16", 0)
            text = f"k is in memory of GPU-{driver.uuid(0)}, the daemon's pages are in that of the host"
            with self.assertRaisesRegex(oscar_kv.InvalidError, text):
                sequence.store(0, 0, tensor, tensor)
            with self.assertRaisesRegex(oscar_kv.InvalidError, "torch has no stream of the host"):
                client.torch_stream()


if __name__ == "__main__":
    unittest.main()
