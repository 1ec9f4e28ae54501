# SPDX-License-Identifier: Apache-2.0
"""Where a tensor lies: address, shape and strides of numpy arrays and of torch tensors, without a copy.

Taken are objects with torch's `data_ptr()` and `stride()`, with `__cuda_array_interface__` or with
`__array_interface__`. Elements of two bytes: torch.bfloat16 or ml_dtypes.bfloat16 for BF16 models, float16 for FP16
ones. numpy has no BF16 of its own: an array of uint16 (or int16) is taken for rows of the model's type, bit by bit;
`bf16_bits` makes one.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from .errors import ErrorCode, OscarError, error_of

# Names of element types and the dtypes of oscar/geometry.h that they stand for; raw bits stand for either.
BF16, FP16 = 1, 2
_RAW = {"uint16", "int16"}
_TYPES = {"bfloat16": BF16, "float16": FP16}

# Array-interface type strings of two-byte elements; ml_dtypes says "<V2", which is told by its name.
_TYPESTRS = {"<u2": "uint16", "<i2": "int16", "<f2": "float16", "<V2": "bfloat16", "|V2": "bfloat16"}


@dataclass(frozen=True)
class View:
    """Address of the first element, shape, and strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: str
    on_gpu: bool
    gpu: str | None  # which one, as in ClientInfo.device; an array interface does not tell
    writable: bool


def _invalid(cause: str) -> OscarError:
    return error_of(ErrorCode.INVALID, cause)


@cache
def torch_gpu(index: int) -> str:
    """The GPU that torch numbers so, as in ClientInfo.device."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def view(tensor: Any) -> View:
    """What the caller's tensor is. InvalidError for anything that is none."""
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "stride"):
        return View(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            element=str(tensor.dtype).removeprefix("torch."),
            on_gpu=tensor.device.type == "cuda",
            gpu=torch_gpu(tensor.device.index) if tensor.device.type == "cuda" else None,
            writable=True,
        )
    interface = getattr(tensor, "__cuda_array_interface__", None)
    on_gpu = interface is not None
    if interface is None:
        interface = getattr(tensor, "__array_interface__", None)
    if interface is None:
        raise _invalid(f"{type(tensor).__name__} is neither a numpy array nor a torch tensor")
    address, read_only = interface["data"]
    shape = tuple(interface["shape"])
    width = int(interface["typestr"][2:])
    strides = interface.get("strides")
    if strides is None:
        strides, step = [], width
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
    if any(stride % width for stride in strides):
        raise _invalid("strides are no multiples of the element's size")
    name = getattr(getattr(tensor, "dtype", None), "name", None)
    if name is None or name.startswith("void"):
        name = _TYPESTRS.get(interface["typestr"], interface["typestr"])
    return View(address, shape, tuple(stride // width for stride in strides), str(name), on_gpu, None, not read_only)


def _on_device(tensor: Any, what: str, gpu: str | None) -> View:
    """A view of memory that the daemon's backend can read: its kernels would end the process at any other address."""
    found = view(tensor)
    if found.on_gpu != (gpu is not None) or (found.gpu or gpu) != gpu:
        lies = (found.gpu or "a GPU") if found.on_gpu else "the host"
        raise _invalid(f"{what} is in memory of {lies}, the daemon's pages are in that of {gpu or 'the host'}")
    return found


def rows(
    tensor: Any, what: str, heads: int, head_dim: int, dtype: int, gpu: str | None, count: int | None = None
) -> View:
    """View of [rows, heads, head_dim] elements of a model's type, the last dimension contiguous, any other strides.

    gpu  which one the tensor must be on; None: in host memory
    """
    found = _on_device(tensor, what, gpu)
    expected = (found.shape[0] if count is None and found.shape else count, heads, head_dim)
    if found.shape != expected:
        wanted = ("rows" if count is None else count, heads, head_dim)
        raise _invalid(f"{what} has the shape {found.shape}, not {wanted}".replace("'", ""))
    if found.element not in _RAW and _TYPES.get(found.element) != dtype:
        wanted_name = next(name for name, value in _TYPES.items() if value == dtype)
        raise _invalid(f"{what} is of {found.element}, the model takes {wanted_name}")
    if found.strides[2] != 1 and head_dim > 1 and found.shape[0] > 0:
        raise _invalid(f"{what}: the elements of a head must be contiguous")
    return found


def lse_rows(tensor: Any, what: str, count: int, heads: int, gpu: str | None) -> View:
    """View of contiguous float32 [rows, heads]."""
    found = _on_device(tensor, what, gpu)
    if found.element != "float32" or found.shape != (count, heads) or found.strides != (heads, 1):
        raise _invalid(f"{what} must be contiguous float32 of the shape {(count, heads)}")
    return found


def bf16_bits(values: Any) -> Any:
    """A numpy array of floats, rounded to nearest even, as the bits of BF16 (uint16)."""
    import numpy as np

    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)


def bf16_values(bits: Any) -> Any:
    """The float32 values of a numpy array of BF16 bits."""
    import numpy as np

    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)
