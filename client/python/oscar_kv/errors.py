# SPDX-License-Identifier: Apache-2.0
"""liboscar's errors as exceptions."""

from enum import IntEnum
from typing import Any

from ._library import library


class ErrorCode(IntEnum):
    """The codes of oscar/error.h."""

    INVALID = -1
    NO_MEMORY = -2
    NO_SPACE = -3
    TIMEOUT = -4
    DISCONNECTED = -5
    NOT_RUNNING = -6
    PROTOCOL = -7
    VERSION = -8
    UNSUPPORTED = -9
    GEOMETRY = -10
    IDENTITY = -11
    CALIBRATION = -12
    NOT_FINITE = -13
    STALE = -14
    NOT_FOUND = -15
    STATE = -16
    LIMIT = -17
    PERMISSION = -18
    IO = -19
    BUSY = -20
    DEVICE = -21
    CONFIG = -22
    CORRUPT = -23
    INTERNAL = -24


class OscarError(Exception):
    """A call of liboscar that failed.

    code    its ErrorCode (a plain int when a newer library has a code that this module does not know)
    cause   what exactly went wrong, one line; may be ""
    remedy  what to do about it
    """

    code: int
    cause: str
    remedy: str

    def __init__(self, code: int, cause: str, text: str, remedy: str) -> None:
        super().__init__(f"{text}: {cause} ({remedy})" if cause else f"{text} ({remedy})")
        try:
            self.code = ErrorCode(code)
        except ValueError:
            self.code = code
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.code, self.cause, self.remedy, str(self))


def _rebuild(kind: type[OscarError], code: int, cause: str, remedy: str, message: str) -> OscarError:
    error = kind(code, cause, "", remedy)
    error.args = (message,)
    return error


class InvalidError(OscarError, ValueError):
    """An argument is not what the call takes: INVALID, GEOMETRY, IDENTITY, UNSUPPORTED."""


class NotFiniteError(OscarError, ValueError):
    """NOT_FINITE: K or V holds NaN, Inf or a magnitude over 65,000."""


class NoSpaceError(OscarError):
    """NO_SPACE: the cache has no room now; closing sequences or waiting may give some."""


class DeadlineError(OscarError, TimeoutError):
    """TIMEOUT: the daemon did not answer in time."""


class ConnectionLostError(OscarError, ConnectionError):
    """DISCONNECTED, NOT_RUNNING: there is no daemon, or no longer."""


class StateError(OscarError):
    """STATE, STALE: the object was closed or overtaken, or the call comes at the wrong time."""


_KINDS: dict[int, type[OscarError]] = {
    ErrorCode.INVALID: InvalidError,
    ErrorCode.GEOMETRY: InvalidError,
    ErrorCode.IDENTITY: InvalidError,
    ErrorCode.UNSUPPORTED: InvalidError,
    ErrorCode.NOT_FINITE: NotFiniteError,
    ErrorCode.NO_SPACE: NoSpaceError,
    ErrorCode.TIMEOUT: DeadlineError,
    ErrorCode.DISCONNECTED: ConnectionLostError,
    ErrorCode.NOT_RUNNING: ConnectionLostError,
    ErrorCode.STATE: StateError,
    ErrorCode.STALE: StateError,
}


def error_of(code: int, cause: str) -> OscarError:
    """The exception for a code and its cause."""
    text = library().oscar_error_text(code).decode()
    remedy = library().oscar_error_remedy(code).decode()
    return _KINDS.get(code, OscarError)(code, cause, text, remedy)


def check(result: int) -> None:
    """Raises what liboscar's last call of this thread failed with, if it did."""
    if result < 0:
        raise error_of(result, library().oscar_error_detail().decode(errors="replace"))
