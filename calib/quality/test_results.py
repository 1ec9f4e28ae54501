# SPDX-License-Identifier: Apache-2.0
"""What is kept is found again, and only by what it follows from. Needs numpy only."""

import tempfile
import unittest
from pathlib import Path

import numpy as np

from results import Results


class Kept(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.program = self.folder / "program"
        self.program.write_bytes(b"first")

    def results(self, common="model"):
        return Results(self.folder, common, self.program)

    def test_is_found_by_a_later_run(self):
        arrays = {"kl": np.arange(3.0), "bits": [16.0, 2.5]}
        self.results().keep(arrays, "ours", [1, 2])
        found = self.results().find("ours", [1, 2])
        self.assertEqual(found.keys(), arrays.keys())
        for name, values in arrays.items():
            self.assertEqual(found[name].tolist(), list(values))

    def test_is_not_found_by_anything_else(self):
        self.results().keep({"kl": [0.5]}, "ours", [1, 2])
        self.assertIsNone(self.results().find("ours", [1, 3]))
        self.assertIsNone(self.results().find("ours", [1], 2))
        self.assertIsNone(self.results("other model").find("ours", [1, 2]))
        self.program.write_bytes(b"second")
        self.assertIsNone(self.results().find("ours", [1, 2]))

    def test_what_was_interrupted_is_not_found(self):
        class Broken:
            def __array__(self, *_arguments, **_options):
                raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            self.results().keep({"kl": [0.5], "same": Broken()}, "ours")
        self.assertIsNone(self.results().find("ours"))


if __name__ == "__main__":
    unittest.main()
