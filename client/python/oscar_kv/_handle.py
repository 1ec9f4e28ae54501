# SPDX-License-Identifier: Apache-2.0
"""Ownership of liboscar's objects: closed once, children before parents, never from a forked child."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from .errors import ErrorCode, error_of

Self = TypeVar("Self", bound="Owned")


class _Pointer:
    """The C object. Closing a parent frees its children in C: a child is alive only while its parents are."""

    def __init__(self, value: int, parent: _Pointer | None, close: Callable[[int], None]) -> None:
        self.value: int | None = value
        self.parent = parent
        self.close_function = close
        self.pid = os.getpid()

    def alive(self) -> bool:
        return self.value is not None and (self.parent is None or self.parent.alive())

    def close(self) -> None:
        if self.value is not None and self.alive() and os.getpid() == self.pid:
            self.close_function(self.value)
        self.value = None


class Owned:
    """Base of Client, Model, Sequence, Lease, Batch and Stream: a context manager that closes what it owns.

    What is not closed by hand is closed when it is collected, or at exit.
    """

    def __init__(self, value: int, parent: Owned | None, close: Callable[[int], None]) -> None:
        above = parent._pointer if parent is not None else None
        self._pointer: _Pointer = _Pointer(value, above, close)
        self._parent = parent  # must not be collected before this object
        self._finalizer = weakref.finalize(self, self._pointer.close)

    @property
    def closed(self) -> bool:
        """Whether it, or what it was opened through, is closed."""
        return not self._pointer.alive()

    @property
    def handle(self) -> int:
        """Address of the C object, for calls that this package does not wrap. StateError once it is closed."""
        if not self._pointer.alive():
            raise error_of(ErrorCode.STALE, f"{type(self).__name__}: closed")
        return self._pointer.value  # type: ignore[return-value]

    def close(self) -> None:
        """Closes it, and all that was opened through it. Again is fine."""
        self._finalizer()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
