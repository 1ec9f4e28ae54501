# SPDX-License-Identifier: Apache-2.0
"""liboscar's C ABI as ctypes sees it: the structs and prototypes of oscar/oscar.h, geometry.h and error.h, and no more.

tests/test_abi.py compares each struct with what a C compiler makes of the header, and each prototype with its text.
"""

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

Handle = c_void_p  # of a client, model, sequence, lease, stream or batch
Digest = c_uint8 * 32
Secret = c_uint8 * 16
Callback = CFUNCTYPE(None, c_void_p)


class Geometry(Structure):
    _fields_ = [
        ("layers", c_uint32),
        ("query_heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_uint32),
        ("page_tokens", c_uint32),
        ("sink_tokens", c_uint32),
        ("recent_tokens", c_uint32),
    ]


class ClientOptions(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("socket", c_char_p),
        ("name", c_char_p),
        ("group", c_char_p),
        ("timeout_ms", c_uint32),
    ]


class ClientInfo(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("incarnation", c_uint64),
        ("protocol_major", c_uint32),
        ("protocol_minor", c_uint32),
        ("backend", c_char * 128),
        ("device", c_char * 128),
        ("tenant", c_char * 128),
        ("daemon_version", c_char * 128),
    ]


class StreamParams(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("threads", c_uint32),
        ("asynchronous", c_uint32),
        ("native", c_void_p),
    ]


class ModelOptions(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("geometry", Geometry),
        ("weights_digest", POINTER(Digest)),
        ("revision", c_char_p),
        ("rope_digest", POINTER(Digest)),
        ("calibration", c_char_p),
        ("adapter", c_char_p),
        ("shard_rank", c_uint32),
        ("shard_size", c_uint32),
    ]


class ModelInfo(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("geometry", Geometry),
        ("model_digest", Digest),
        ("calibration_digest", Digest),
        ("dense_page_bytes", c_uint64),
        ("packed_page_bytes", c_uint64),
    ]


class ProbeResult(Structure):
    _fields_ = [
        ("hit_tokens", c_uint32),
        ("in_flight_tokens", c_uint32),
    ]


class SeqInfo(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("hit_tokens", c_uint32),
        ("in_flight_tokens", c_uint32),
        ("committed_tokens", c_uint32),
        ("reserved_tokens", c_uint32),
        ("sealed_tokens", c_uint32),
        ("packed_tokens", c_uint32),
    ]


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
    ]


class AttendQuery(Structure):
    _fields_ = [
        ("seq", Handle),
        ("tokens", c_uint32),
        ("rows", c_uint32),
        ("q", c_void_p),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("out", c_void_p),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse", c_void_p),
    ]


class Partial(Structure):
    _fields_ = [
        ("out", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("lse", c_void_p),
    ]


class BatchParams(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("max_seqs", c_uint32),
        ("max_rows", c_uint32),
        ("max_tokens", c_uint64),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("k_row_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v_row_stride", c_int64),
        ("v_head_stride", c_int64),
    ]


class BatchEntry(Structure):
    _fields_ = [
        ("seq", Handle),
        ("rows", c_uint32),
        ("tokens", c_uint32),
    ]


# Names of the structs in C.
STRUCTS: dict[str, type[Structure]] = {
    "oscar_geometry": Geometry,
    "oscar_client_options": ClientOptions,
    "oscar_client_info": ClientInfo,
    "oscar_stream_params": StreamParams,
    "oscar_model_options": ModelOptions,
    "oscar_model_info": ModelInfo,
    "oscar_probe_result": ProbeResult,
    "oscar_seq_info": SeqInfo,
    "oscar_tensor": Tensor,
    "oscar_attend_query": AttendQuery,
    "oscar_partial": Partial,
    "oscar_batch_params": BatchParams,
    "oscar_batch_entry": BatchEntry,
}

_new = POINTER(Handle)
_tokens = c_void_p  # an array('I') or any other uint32 buffer

# Result type and argument types of every function that liboscar exports.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "oscar_version": (c_char_p,),
    "oscar_error_detail": (c_char_p,),
    "oscar_error_name": (c_char_p, c_int),
    "oscar_error_text": (c_char_p, c_int),
    "oscar_error_remedy": (c_char_p, c_int),
    "oscar_client_open": (c_int, POINTER(ClientOptions), _new),
    "oscar_client_close": (None, Handle),
    "oscar_client_set_timeout": (None, Handle, c_uint32),
    "oscar_client_info": (c_int, Handle, POINTER(ClientInfo)),
    "oscar_client_ping": (c_int, Handle),
    "oscar_stream_open": (c_int, Handle, POINTER(StreamParams), _new),
    "oscar_stream_wait": (c_int, Handle, c_uint32),
    "oscar_stream_call": (c_int, Handle, Callback, c_void_p),
    "oscar_stream_close": (None, Handle),
    "oscar_geometry_init": (None, POINTER(Geometry), c_uint32, c_uint32, c_uint32, c_uint32, c_uint32),
    "oscar_model_open": (c_int, Handle, POINTER(ModelOptions), _new),
    "oscar_model_close": (None, Handle),
    "oscar_model_info": (c_int, Handle, POINTER(ModelInfo)),
    "oscar_model_rotation": (c_int, Handle, c_uint32, c_uint32, c_uint, POINTER(c_float)),
    "oscar_probe": (c_int, Handle, _tokens, c_uint32, POINTER(ProbeResult), _new),
    "oscar_lease_secret": (c_int, Handle, POINTER(Secret)),
    "oscar_lease_adopt": (c_int, Handle, POINTER(Secret), _new, POINTER(c_uint32)),
    "oscar_lease_close": (None, Handle),
    "oscar_seq_open": (c_int, Handle, _tokens, c_uint32, c_uint32, _new),
    "oscar_seq_wait": (c_int, Handle, c_uint32),
    "oscar_seq_info": (c_int, Handle, POINTER(SeqInfo)),
    "oscar_seq_reserve": (c_int, Handle, c_uint32),
    "oscar_seq_store": (c_int, Handle, Handle, c_uint32, c_uint32, c_uint32, POINTER(Tensor), POINTER(Tensor)),
    "oscar_seq_rows": (c_int, Handle, c_uint32, c_uint32, c_uint32, _new, _new, POINTER(c_uint32)),
    "oscar_seq_advance": (c_int, Handle, Handle, _tokens, c_uint32),
    "oscar_seq_fork": (c_int, Handle, Handle, _new),
    "oscar_seq_close": (None, Handle),
    "oscar_attend": (c_int, Handle, Handle, c_uint32, c_float, POINTER(AttendQuery), c_uint32),
    "oscar_merge": (c_int, Handle, Handle, c_uint32, POINTER(Partial), POINTER(Partial)),
    "oscar_batch_open": (c_int, Handle, POINTER(BatchParams), _new),
    "oscar_batch_close": (None, Handle),
    "oscar_batch_set": (c_int, Handle, Handle, POINTER(BatchEntry), c_uint32),
    "oscar_batch_store": (c_int, Handle, Handle, c_uint32, c_void_p, c_void_p),
    "oscar_batch_attend": (c_int, Handle, Handle, c_uint32, c_float, c_void_p, c_void_p, c_void_p),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives each function of `library` its prototype. AttributeError names one that the library does not have."""
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
