# SPDX-License-Identifier: Apache-2.0
"""Finding and loading liboscar, once a process."""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from . import _abi

SONAME = "liboscar.so.0"


def _candidates() -> list[str]:
    """What to try, in order: what is named, else beside Python's prefix, else what the system's loader finds."""
    named = os.environ.get("OSCAR_LIBRARY")
    if named:
        return [named]
    prefixes = dict.fromkeys([sys.prefix, sys.base_prefix, "/usr/local"])
    folders = [Path(prefix, lib) for prefix in prefixes for lib in ("lib", "lib64")]
    return [str(folder / SONAME) for folder in folders if (folder / SONAME).exists()] + [SONAME]


@cache
def library() -> ctypes.CDLL:
    """liboscar with its prototypes. ImportError says what was tried."""
    failures = []
    for candidate in _candidates():
        try:
            return _abi.bind(ctypes.CDLL(candidate))
        except (OSError, AttributeError) as error:
            failures.append(str(error))
    raise ImportError(
        f"cannot load liboscar ({'; '.join(failures)}): install oscard's client library, "
        "or set OSCAR_LIBRARY to the path of liboscar.so"
    )


def version() -> str:
    """Version of liboscar, such as "0.1.0"."""
    return str(library().oscar_version(), "utf-8")
