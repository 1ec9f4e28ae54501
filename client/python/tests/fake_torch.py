# SPDX-License-Identifier: Apache-2.0
"""What oscar_kv uses of torch and its CUDA tensors, on a driver library without a GPU (tests/support/cuda_emulation).

Memory of the driver's devices can be read and written by the CPU, and its kernels refuse any other.
"""

import ctypes
import types
from math import prod

import numpy as np

from oscar_kv import tensors


class Driver:
    """The driver library at `path`, with the context of its first device current in this thread."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxPushCurrent_v2", context)

    def __call__(self, function, *arguments):
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            raise RuntimeError(f"{function}: {result}")

    def stream(self):
        """A new CUstream, as an integer."""
        stream = ctypes.c_void_p()
        self("cuStreamCreateWithPriority", ctypes.byref(stream), 0, 0)
        return stream.value

    def uuid(self, device):
        """As torch writes it."""
        digits = (ctypes.c_uint8 * 16)()
        self("cuDeviceGetUuid_v2", ctypes.byref(digits), device)
        text = bytes(digits).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def copy(self, to, source, bytes_, stream):
        """Enqueues a copy between addresses."""
        self("cuMemcpyAsync", *map(ctypes.c_uint64, (to, source, bytes_)), ctypes.c_void_p(stream))

    def wait(self, stream):
        """Until all that was enqueued is done."""
        self("cuStreamSynchronize", ctypes.c_void_p(stream))


class Tensor:
    """A contiguous tensor in memory of the driver; `array` is the same memory as numpy sees it."""

    def __init__(self, driver, shape, dtype, device):
        address = ctypes.c_uint64()
        kind = np.dtype(np.float32 if dtype == "float32" else np.uint16)
        driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(prod(shape), 1) * kind.itemsize))
        memory = (ctypes.c_uint8 * (prod(shape) * kind.itemsize)).from_address(address.value)
        self.array = np.frombuffer(memory, kind).reshape(shape)
        self.shape, self.dtype = shape, f"torch.{dtype}"
        self.device = types.SimpleNamespace(type="cuda", index=device)

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)


def torch(driver, devices, stream=0):
    """A module in the place of torch: it sees these of the driver's devices, in this order, with a current stream."""
    module = types.ModuleType("torch")
    module.cuda = types.SimpleNamespace(
        device_count=lambda: len(devices),
        get_device_properties=lambda index: types.SimpleNamespace(uuid=driver.uuid(devices[index])),
        current_stream=lambda index: types.SimpleNamespace(cuda_stream=module.streams[index]),
    )
    module.streams = {index: stream for index in range(len(devices))}
    tensors.torch_gpu.cache_clear()
    return module
