# SPDX-License-Identifier: Apache-2.0
"""The numpy codec against the golden vectors, and its fma against exact arithmetic. Needs numpy only."""

import unittest
from fractions import Fraction
from pathlib import Path

import numpy as np

import codec
import tensor_file

GOLDEN = Path(__file__).resolve().parents[2] / "tests/data/golden"


class GoldenVectors(unittest.TestCase):
    def test_every_output_is_equal_to_the_bit(self):
        files = sorted(GOLDEN.glob("codec-*.safetensors"))
        self.assertGreaterEqual(len(files), 6)
        for path in files:
            with self.subTest(path.name):
                self.check(tensor_file.read(path)[0])

    def check(self, golden):
        rows, rank = golden["rows"], int(golden["rank"][0])
        cos, sin = codec.turns(golden["omega"], golden["positions"])
        centre = codec.centre(golden["centre_static"], golden["centre_a"], golden["centre_b"], cos, sin)
        self.equal(centre, golden["centre"])
        for rounding, factor in (("nearest", None), ("feedback", golden["feedback_factor"])):
            packed = codec.pack(rows - centre, rank, factor)
            self.equal(packed.unpacked_codes(), golden[f"codes_{rounding}"])
            self.equal(packed.scale, golden["scale"])
            self.equal(packed.zero, golden["zero"])

    def equal(self, found, expected):
        self.assertEqual((found.dtype, found.shape), (expected.dtype, expected.shape))
        self.assertEqual(found.tobytes(), expected.tobytes())


class Packing(unittest.TestCase):
    def test_bytes_are_held_as_counted(self):
        packed = codec.pack(np.random.default_rng(1).standard_normal((10, 64), np.float32), 63)
        self.assertEqual(packed.nbytes, 10 * (16 + 4))

    def test_error_of_an_unclipped_row_is_at_most_half_a_step(self):
        x = np.random.default_rng(2).standard_normal((1000, 128), np.float32)
        packed = codec.pack(x, 127)
        step = packed.scale.astype(np.float32)[:, None]
        self.assertTrue((np.abs(packed.unpack() - x) <= 0.502 * step).all())

    def test_what_is_not_finite_is_refused(self):
        for bad in (np.nan, np.inf, 3e38):
            x = np.ones((2, 64), np.float32)
            x[1, 5] = bad
            x[1, 6] = -1
            with self.assertRaises(ValueError):
                codec.pack(x, 63)


class Fma(unittest.TestCase):
    def test_rounds_once(self):
        rng = np.random.default_rng(3)
        a, b, c = (rng.standard_normal(2000).astype(np.float32) for _ in range(3))
        # Products that lie a little beside the middle of two numbers, so that rounding twice goes wrong.
        a[0], b[0], c[0] = 1 + 2**-12, 1 + 2**-12, 2**-60
        a[1], b[1], c[1] = 1 + 2**-12, 1 + 2**-12, -(2**-60)
        a[2], b[2], c[2] = 1 + 2**-12, 1 + 2**-12, 0
        found = codec.fma(*(x.astype(np.float64) for x in (a, b, c)))
        for values in zip(a, b, c, found):
            x, y, z, result = (Fraction(float(value)) for value in values)
            exact = x * y + z
            near = np.float32(float(result))
            below, above = (Fraction(float(np.nextafter(near, np.float32(to)))) for to in (-np.inf, np.inf))
            self.assertLessEqual(abs(exact - result), min(abs(exact - below), abs(exact - above)))
        self.assertEqual(
            [float(x) for x in found[:3]], [1 + 2**-11 + 2**-23, 1 + 2**-11, 1 + 2**-11]
        )


if __name__ == "__main__":
    unittest.main()
