# SPDX-License-Identifier: Apache-2.0
"""The connection to the daemon, and the streams that work is enqueued on."""

import ctypes
from array import array
from ctypes import byref, sizeof
from dataclasses import dataclass
from typing import Any

from . import _abi
from ._handle import Owned
from ._library import library
from .errors import ErrorCode, check, error_of
from .tensors import torch_gpu

CU_STREAM_LEGACY = 1  # the native handle of CUDA's legacy default stream


@dataclass(frozen=True)
class ClientInfo:
    """What the daemon said of itself."""

    incarnation: int  # another value means that the daemon lost its cache in between
    protocol: tuple[int, int]
    backend: str  # "host" or "cuda": where tensors must lie
    device: str  # of cuda: the GPU's UUID, "GPU-..."
    tenant: str
    daemon_version: str


class Client(Owned):
    """A connection to oscard. A forked child opens one of its own. May be used from any threads at once.

    socket      path; None: $OSCAR_SOCKET, else $XDG_RUNTIME_DIR/oscard/worker.sock, else /run/oscard/worker.sock
    name        shown to operators; None: the program's name
    group       workers of one group may adopt each other's leases
    timeout_ms  of every call that speaks to the daemon; 0: 5000

    gpu         the GPU that the daemon's pages, and so the tensors of all calls, are on; None: host memory

    Raises ConnectionLostError where there is no daemon, OscarError (VERSION, PERMISSION, LIMIT), DeadlineError.
    Closing it closes all that was opened through it.
    """

    def __init__(
        self,
        socket: str | None = None,
        *,
        name: str | None = None,
        group: str | None = None,
        timeout_ms: int = 0,
    ) -> None:
        options = _abi.ClientOptions(
            size=sizeof(_abi.ClientOptions),
            socket=_text(socket),
            name=_text(name),
            group=_text(group),
            timeout_ms=timeout_ms,
        )
        handle = _abi.Handle()
        check(library().oscar_client_open(byref(options), byref(handle)))
        super().__init__(handle.value or 0, None, library().oscar_client_close)
        info = self.info()
        self.gpu = info.device if info.backend == "cuda" else None
        self._torch_streams: dict[int, Stream] = {}

    def set_timeout(self, timeout_ms: int) -> None:
        """Sets the time that a call may take that speaks to the daemon."""
        library().oscar_client_set_timeout(self.handle, timeout_ms)

    def info(self) -> ClientInfo:
        """What the daemon said when the connection was made."""
        info = _abi.ClientInfo(size=sizeof(_abi.ClientInfo))
        check(library().oscar_client_info(self.handle, byref(info)))
        return ClientInfo(
            incarnation=info.incarnation,
            protocol=(info.protocol_major, info.protocol_minor),
            backend=info.backend.decode(),
            device=info.device.decode(),
            tenant=info.tenant.decode(),
            daemon_version=info.daemon_version.decode(),
        )

    def ping(self) -> None:
        """An empty round trip: a health check."""
        check(library().oscar_client_ping(self.handle))

    def torch_stream(self) -> "Stream":
        """torch's current CUDA stream on the daemon's GPU: work is enqueued there, in order with torch's own.

        InvalidError where torch does not see that GPU.
        """
        import torch

        native = torch.cuda.current_stream(self._torch_device()).cuda_stream or CU_STREAM_LEGACY
        stream = self._torch_streams.get(native)
        if stream is None:
            stream = self._torch_streams[native] = Stream(self, native=native)
        return stream

    def _torch_device(self) -> int:
        """What torch numbers the daemon's GPU."""
        import torch

        for index in range(torch.cuda.device_count()):
            if torch_gpu(index) == self.gpu:
                return index
        raise error_of(
            ErrorCode.INVALID, f"torch has no {self.gpu or 'stream of the host'}: the daemon's pages are there"
        )


class Stream(Owned):
    """Where calls that touch pages are enqueued.

    threads       on the host: CPU threads that a call may use
    asynchronous  calls return at once; the stream keeps their tensors until `wait` or `close`
    native        on a GPU: the worker's own stream as an integer (a CUstream), always asynchronous; it must outlive
                  this object, and tensors must stay until it has passed (torch's allocator sees to that for the stream
                  that it uses)

    Where a call takes `stream=None`, its work is done when the call returns.
    """

    def __init__(
        self, client: Client, *, threads: int = 0, asynchronous: bool = False, native: int | None = None
    ) -> None:
        params = _abi.StreamParams(
            size=sizeof(_abi.StreamParams), threads=threads, asynchronous=int(asynchronous), native=native
        )
        handle = _abi.Handle()
        check(library().oscar_stream_open(client.handle, byref(params), byref(handle)))
        super().__init__(handle.value or 0, None, library().oscar_stream_close)
        self._keeps = asynchronous and native is None
        self._kept: list[Any] = []

    def wait(self, timeout_ms: int = 60_000) -> None:
        """Waits for what is enqueued. DeadlineError, or the work's first failure (NotFiniteError, DEVICE)."""
        check(library().oscar_stream_wait(self.handle, timeout_ms))
        self._kept.clear()

    def close(self) -> None:
        """Waits for its work, and closes it."""
        super().close()
        self._kept.clear()

    def _keep(self, *tensors: Any) -> None:
        if self._keeps:
            self._kept.extend(tensors)


def _text(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def stream_handle(stream: Stream | None, *tensors: Any) -> int | None:
    """The C stream, or None; an asynchronous host stream keeps the tensors."""
    if stream is None:
        return None
    stream._keep(*tensors)
    return stream.handle


def tokens_buffer(tokens: Any) -> tuple[Any, int]:
    """Token ids (any sequence or integer array) as an array of uint32, and their count. Else InvalidError."""
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise error_of(ErrorCode.INVALID, f"token ids: {error}") from error
    return (ctypes.c_uint32 * len(ids))(*ids), len(ids)
