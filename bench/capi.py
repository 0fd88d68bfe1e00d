"""The C ABI of kvtile (include/kvtile/c_api.h) through ctypes: structs, calls, and a packed cache.

Inputs: a path to libkvtile.so. Field order and types mirror the header; the library refuses a
struct whose size it does not know, so a mirror that has fallen behind fails at the first call.
Every failed call raises KvtileError with the library's own text.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p

import numpy as np

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
KEY_FP8_E4M3 = 0
TOKEN_MAJOR = 0
WORKSPACE_ALIGNMENT = 64


class KvtileError(RuntimeError):
    pass


class Struct(ctypes.Structure):
    """A struct that states its own size, as KVTILE_INIT does."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(type(self)), **fields)


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
                ("num_kv_heads", c_int32), ("stride_block", c_int64), ("stride_token", c_int64),
                ("stride_head", c_int64), ("format", Format)]


class EncodeCall(Struct):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("key", c_void_p), ("value", c_void_p),
                ("num_tokens", c_int64), ("key_stride_token", c_int64),
                ("key_stride_head", c_int64), ("value_stride_token", c_int64),
                ("value_stride_head", c_int64), ("slot_mapping", c_void_p), ("cache", Cache),
                ("checked", c_int32), ("num_threads", c_int32), ("backend", c_char_p),
                ("stream", c_void_p), ("device_plus_one", c_int32), ("reserved", c_int32)]


class DecodeCall(Struct):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("cache", Cache),
                ("slot_mapping", c_void_p), ("num_tokens", c_int64), ("key", c_void_p),
                ("value", c_void_p), ("unrotate_keys", c_int32), ("num_threads", c_int32),
                ("backend", c_char_p), ("stream", c_void_p), ("device_plus_one", c_int32),
                ("reserved", c_int32)]


class AttentionCall(Struct):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("query", c_void_p), ("out", c_void_p),
                ("lse", c_void_p), ("num_seqs", c_int32), ("num_heads", c_int32),
                ("total_q", c_int64), ("softmax_scale", c_float), ("softcap", c_float),
                ("sinks", c_void_p), ("causal", c_int32), ("reserved", c_int32),
                ("window", c_int64), ("cache", Cache), ("block_table", c_void_p),
                ("max_blocks", c_int64), ("block_table_stride", c_int64),
                ("cu_seqlens_q", c_void_p), ("seq_lens", c_void_p),
                ("first_positions", c_void_p), ("chunk_key", c_void_p),
                ("chunk_value", c_void_p)] + [
                    (name, c_int64) for name in (
                        "query_stride_token", "query_stride_head", "out_stride_token",
                        "out_stride_head", "chunk_key_stride_token", "chunk_key_stride_head",
                        "chunk_value_stride_token", "chunk_value_stride_head", "lse_stride_head",
                        "lse_stride_token", "tile_tokens", "max_q_len", "max_seq_len")] + [
                            ("backend", c_char_p), ("num_threads", c_int32),
                            ("device_plus_one", c_int32), ("stream", c_void_p), ("workspace", c_void_p),
                            ("workspace_bytes", c_size_t)]


class RunReport(Struct):
    _fields_ = [("size", c_uint32), ("num_threads", c_int32), ("backend", c_char_p),
                ("workspace_bytes", c_size_t), ("tile_tokens", c_int64)]


def pointer(array):
    return None if array is None else array.ctypes.data


def aligned_bytes(count):
    """A byte array whose first element is aligned as a workspace must be."""
    raw = np.empty(count + WORKSPACE_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % WORKSPACE_ALIGNMENT
    return raw[start:start + count]


class Library:
    def __init__(self, path):
        self._lib = ctypes.CDLL(path)
        self._lib.kvtile_last_error.restype = c_char_p
        self._lib.kvtile_version.restype = c_char_p
        self._lib.kvtile_parse_preset.argtypes = [c_char_p, c_int, c_int, POINTER(Format)]

    def _call(self, name, *args):
        if getattr(self._lib, name)(*args) != 0:
            raise KvtileError(f"{name}: {self._lib.kvtile_last_error().decode()}")

    def version(self):
        return self._lib.kvtile_version().decode()

    def parse_preset(self, name, head_dim):
        fmt = Format()
        self._call("kvtile_parse_preset", name.encode(), head_dim, KEY_FP8_E4M3, ctypes.byref(fmt))
        return fmt

    def slot_layout(self, fmt):
        slot = SlotMap()
        self._call("kvtile_slot_layout", ctypes.byref(fmt), ctypes.byref(slot))
        return slot

    def slot_bytes(self, fmt):
        return self.slot_layout(fmt).slot_bytes

    def encode(self, call):
        self._call("kvtile_encode", ctypes.byref(call), None)

    def decode(self, call):
        self._call("kvtile_decode", ctypes.byref(call))

    def workspace_bytes(self, call):
        need = c_size_t()
        self._call("kvtile_workspace_bytes", ctypes.byref(call), ctypes.byref(need))
        return need.value

    def attend(self, call, report=None):
        self._call("kvtile_attend", ctypes.byref(call),
                   None if report is None else ctypes.byref(report))


class PackedCache:
    """One sequence of num_tokens in a pool of pages handed out in shuffled order."""

    def __init__(self, library, preset, num_tokens, num_kv_heads, head_dim, block_size=16, seed=0):
        self.library = library
        self.num_tokens = num_tokens
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        fmt = library.parse_preset(preset, head_dim)
        num_blocks = -(-num_tokens // block_size)
        self.pages = np.zeros(num_blocks * block_size * num_kv_heads * library.slot_bytes(fmt),
                              np.uint8)
        self.block_table = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        tokens = np.arange(num_tokens)
        self.slots = (self.block_table[tokens // block_size].astype(np.int64) * block_size +
                      tokens % block_size)
        self.struct = Cache(layout=TOKEN_MAJOR, pages=pointer(self.pages),
                            pages_bytes=self.pages.nbytes, num_blocks=num_blocks,
                            block_size=block_size, num_kv_heads=num_kv_heads, format=fmt)

    def encode(self, key, value, dtype=FLOAT32, num_threads=0):
        """key, value: [num_tokens, num_kv_heads, head_dim] of dtype."""
        self.library.encode(EncodeCall(
            dtype=dtype, key=pointer(key), value=pointer(value), num_tokens=self.num_tokens,
            slot_mapping=pointer(self.slots), cache=self.struct, num_threads=num_threads))

    def decode(self, key, value, dtype=FLOAT32, unrotate_keys=True, num_threads=0):
        self.library.decode(DecodeCall(
            dtype=dtype, cache=self.struct, slot_mapping=pointer(self.slots),
            num_tokens=self.num_tokens, key=pointer(key), value=pointer(value),
            unrotate_keys=int(unrotate_keys), num_threads=num_threads))


class Attention:
    """attend() of one sequence, fp32, over any of several caches of the same shape.

    chunk: (key, value) of the last q_len tokens, read raw; None means that they are in the cache.
    """

    def __init__(self, library, caches, query, chunk=None, causal=True, num_threads=1):
        q_len, num_heads, head_dim = query.shape
        seq_len = caches[0].num_tokens + (q_len if chunk else 0)
        self.library = library
        self.caches = caches
        self.query = query
        self.out = np.empty_like(query)
        self.lse = np.empty((num_heads, q_len), np.float32)
        self.chunk = chunk
        self.causal = causal
        self.num_threads = num_threads
        self.softmax_scale = head_dim**-0.5
        self._cu_seqlens_q = np.array([0, q_len], np.int32)
        self._seq_lens = np.array([seq_len], np.int32)
        # A raw chunk needs no pages of its own, but the table must cover every position.
        num_blocks = -(-seq_len // caches[0].struct.block_size)
        self._tables = [np.resize(cache.block_table, num_blocks) for cache in caches]
        self._calls = [self._make_call(i) for i in range(len(caches))]
        self.workspace_bytes = library.workspace_bytes(self._calls[0])
        self._workspace = aligned_bytes(self.workspace_bytes)
        for call in self._calls:
            call.workspace = pointer(self._workspace)
            call.workspace_bytes = self.workspace_bytes
        self._next = 0

    def _make_call(self, i):
        q_len, num_heads, _ = self.query.shape
        key, value = self.chunk or (None, None)
        return AttentionCall(
            dtype=FLOAT32, query=pointer(self.query), out=pointer(self.out),
            lse=pointer(self.lse), num_seqs=1, num_heads=num_heads, total_q=q_len,
            softmax_scale=self.softmax_scale, causal=int(self.causal), cache=self.caches[i].struct,
            block_table=pointer(self._tables[i]), max_blocks=self._tables[i].size,
            cu_seqlens_q=pointer(self._cu_seqlens_q), seq_lens=pointer(self._seq_lens),
            chunk_key=pointer(key), chunk_value=pointer(value), backend=b"cpu",
            num_threads=self.num_threads)

    def run(self, cache_index=None, report=None):
        """Runs over the named cache, or over the next one in turn."""
        if cache_index is None:
            cache_index = self._next
            self._next = (self._next + 1) % len(self._calls)
        self.library.attend(self._calls[cache_index], report)

    def flops(self):
        """4 * head_dim * num_heads for each visible (query, key) pair."""
        q_len, num_heads, head_dim = self.query.shape
        seq_len = int(self._seq_lens[0])
        hidden = q_len * (q_len - 1) // 2 if self.causal else 0
        return 4 * head_dim * num_heads * (q_len * seq_len - hidden)
