"""libkvtile through ctypes: the structs of include/kvtile/c_api.h and the calls that take them.

The structs' `_fields_` mirror the header; the library refuses a struct whose size it does not know,
so a mirror that fell behind fails at its first call. A call struct is packed in one step from
values in the order of its fields: assigning forty ctypes fields would cost more than a
decode call may.
"""

import ctypes
import functools
import os
import pathlib
import struct
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p

from kvtile import errors

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
WORKSPACE_ALIGNMENT = 64


class Struct(ctypes.Structure):
    """A struct that states its own size, as KVTILE_INIT does."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(type(self)), **fields)


def _int64(*names):
    return [(name, c_int64) for name in names]


_STREAM = [("stream", c_void_p), ("device_plus_one", c_int32), ("reserved", c_int32)]


class Format(Struct):
    _fields_ = [("size", c_uint32), ("head_dim", c_int32), ("key", c_int32), ("value", c_int32),
                ("norm_correction", c_int32)]


class SlotMap(Struct):
    _fields_ = [("size", c_uint32)] + [
        (name, c_int32) for name in ("key_bytes", "norm_offset", "value_offset", "scale_offset",
                                     "zero_offset", "slot_bytes")]


class Cache(Struct):
    _fields_ = [("size", c_uint32), ("layout", c_int32), ("pages", c_void_p),
                ("pages_bytes", c_int64), ("num_blocks", c_int64), ("block_size", c_int32),
                ("num_kv_heads", c_int32),
                *_int64("stride_block", "stride_token", "stride_head"), ("format", Format)]


class EncodeReport(Struct):
    _fields_ = [("size", c_uint32),
                *_int64("tokens", "skipped", "non_finite_keys", "non_finite_values",
                        "norms_saturated", "key_elements_clamped", "value_elements_clamped")]


class EncodeCall(Struct):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("key", c_void_p), ("value", c_void_p),
                *_int64("num_tokens", "key_stride_token", "key_stride_head",
                        "value_stride_token", "value_stride_head"),
                ("slot_mapping", c_void_p), ("cache", Cache), ("checked", c_int32),
                ("num_threads", c_int32), ("backend", c_char_p), *_STREAM]


class DecodeCall(Struct):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("cache", Cache),
                ("slot_mapping", c_void_p), ("num_tokens", c_int64), ("key", c_void_p),
                ("value", c_void_p), ("unrotate_keys", c_int32), ("num_threads", c_int32),
                ("backend", c_char_p), *_STREAM]


class AttentionCall(Struct):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("query", c_void_p), ("out", c_void_p),
                ("lse", c_void_p), ("num_seqs", c_int32), ("num_heads", c_int32),
                ("total_q", c_int64), ("softmax_scale", c_float), ("softcap", c_float),
                ("sinks", c_void_p), ("causal", c_int32), ("batch_invariant", c_int32),
                ("window", c_int64), ("cache", Cache), ("block_table", c_void_p),
                *_int64("max_blocks", "block_table_stride"), ("cu_seqlens_q", c_void_p),
                ("seq_lens", c_void_p), ("first_positions", c_void_p), ("chunk_key", c_void_p),
                ("chunk_value", c_void_p),
                *_int64("query_stride_token", "query_stride_head", "out_stride_token",
                        "out_stride_head", "chunk_key_stride_token", "chunk_key_stride_head",
                        "chunk_value_stride_token", "chunk_value_stride_head", "lse_stride_head",
                        "lse_stride_token", "tile_tokens", "max_q_len", "max_seq_len"),
                ("backend", c_char_p), ("num_threads", c_int32), ("device_plus_one", c_int32),
                ("stream", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_size_t)]


class RunReport(Struct):
    """What a call did; pass one as `report` and read it after the call.

    backend: the path taken, such as b"cpu/avx3". workspace_bytes: scratch used. tile_tokens: after
    rounding. num_threads: CPU threads, 0 on a GPU.
    """
    _fields_ = [("size", c_uint32), ("num_threads", c_int32), ("backend", c_char_p),
                ("workspace_bytes", c_size_t), ("tile_tokens", c_int64)]


class PartialState(Struct):
    _fields_ = [("size", c_uint32), ("out", c_void_p), ("lse", c_void_p),
                *_int64("out_stride_token", "out_stride_head", "lse_stride_head",
                        "lse_stride_token")]


class MergeCall(Struct):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("states", c_void_p),
                ("num_states", c_int32), ("num_heads", c_int32), ("total_q", c_int64),
                ("head_dim", c_int32), ("num_threads", c_int32), ("out", c_void_p),
                ("lse", c_void_p),
                *_int64("out_stride_token", "out_stride_head", "lse_stride_head",
                        "lse_stride_token"),
                ("backend", c_char_p), *_STREAM]


class Device(Struct):
    """A CUDA device.

    arch: 10 * major + minor. copy_gb_per_s: bytes read plus bytes written; copy_rate_measured is 0
    where it is derived from the memory clock. name: bytes.
    """
    _fields_ = [("size", c_uint32),
                *[(name, c_int32) for name in ("arch", "num_sms", "shared_bytes_per_block",
                                               "shared_bytes_per_sm", "copy_rate_measured")],
                *_int64("l2_bytes", "memory_bytes"), ("copy_gb_per_s", c_double),
                ("name", c_char_p)]


_CODES = {c_uint32: "I", c_int32: "i", c_int64: "q", c_float: "f", c_size_t: "Q", c_void_p: "Q",
          c_char_p: "Q"}


def _packer(struct_type):
    """Function from the values of a struct's fields after `size`, in order, to its bytes.

    Pointers are integers, 0 for null; a nested struct is the bytes of its own packed form.
    """
    text, end = "<", 0
    for name, kind in struct_type._fields_:
        offset, size = getattr(struct_type, name).offset, ctypes.sizeof(kind)
        text += "x" * (offset - end) + _CODES.get(kind, f"{size}s")
        end = offset + size
    total = ctypes.sizeof(struct_type)
    return functools.partial(struct.Struct(text + "x" * (total - end)).pack, total)


pack_cache, pack_encode, pack_decode, pack_attention, pack_merge = map(
    _packer, (Cache, EncodeCall, DecodeCall, AttentionCall, MergeCall))


def _library_path():
    """KVTILE_LIBRARY names another library than the one the package carries."""
    named = os.environ.get("KVTILE_LIBRARY")
    return pathlib.Path(named) if named else pathlib.Path(__file__).parent / "libkvtile.so"


def _load():
    path = _library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise errors.Unavailable(f"libkvtile: got {error}, wanted the library of this package "
                                 "(or its path in KVTILE_LIBRARY)") from None
    for name in ("version", "last_error", "preset_name", "backend_name"):
        getattr(lib, f"kvtile_{name}").restype = c_char_p
    for name, count in (("encode", 2), ("decode", 1), ("workspace_bytes", 2), ("attend", 2),
                        ("merge", 1), ("slot_layout", 2), ("match_descriptor", 2)):
        getattr(lib, f"kvtile_{name}").argtypes = [c_char_p] + [c_void_p] * (count - 1)
    lib.kvtile_cache_descriptor.argtypes = [c_char_p, c_void_p, c_size_t, c_void_p]
    lib.kvtile_device_info.argtypes = [ctypes.c_int, c_void_p]
    lib.kvtile_parse_preset.argtypes = [c_char_p, ctypes.c_int, ctypes.c_int, c_void_p]
    return lib


lib = _load()


def check(status):
    """Raises the exception of a status other than 0, with the library's own text."""
    if status:
        kind = errors.BY_STATUS[status] if status < len(errors.BY_STATUS) else errors.KvtileError
        raise kind(lib.kvtile_last_error().decode())


def version() -> str:
    """Version of the loaded library."""
    return lib.kvtile_version().decode()


def backends() -> tuple[str, ...]:
    """Names of the library's backends, in its order of preference; the last is "cpu"."""
    return tuple(lib.kvtile_backend_name(i).decode() for i in range(lib.kvtile_num_backends()))


def devices() -> tuple[Device, ...]:
    """CUDA devices the library can use, by ordinal; empty without a CUDA build, driver or device.

    Raises Unsupported for an architecture this build has no code for.
    """
    found = tuple(Device() for _ in range(lib.kvtile_num_devices()))
    for ordinal, device in enumerate(found):
        check(lib.kvtile_device_info(ordinal, ctypes.byref(device)))
    return found


@functools.lru_cache(maxsize=64)
def _c_string(text):
    return ctypes.create_string_buffer(text.encode())


def c_string(text):
    """Address of a NUL-terminated copy of a backend name."""
    return ctypes.addressof(_c_string(text))
