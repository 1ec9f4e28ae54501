# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need numpy alone; exits with 77, as a skipped program does, where there is no numpy."""

import importlib.util
import sys
import unittest
from pathlib import Path

if importlib.util.find_spec("numpy") is None:
    print(f"{sys.executable} has no numpy: install python3-numpy")
    sys.exit(77)
here = Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent))
unittest.main(module=None, argv=["run.py", "discover", "-s", str(here)])
