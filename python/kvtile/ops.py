"""encode, decode, attend, merge_states and workspace_bytes over numpy arrays and torch tensors.

Every argument is checked here against the shapes stated before the library is called, and lengths,
slots and tables by the library before it writes; both name the argument. Arrays of one call are
all on one device, given by `query` or `key`: host memory runs the backend "cpu", a CUDA tensor the
backend "cuda" on torch's current stream of its device. Nothing is copied and nothing waits.
"""

import ctypes
import threading
from typing import NamedTuple

import numpy as np

from kvtile import _lib
from kvtile._arrays import (DTYPE_NAMES, FLOATS, INT32, INT64, UINT8, addresses, device_text,
                            dtype_code, empty_like, family, is_torch, layout, same_device, view)
from kvtile._lib import FLOAT32, WORKSPACE_ALIGNMENT, RunReport, check, lib, pack_attention
from kvtile.cache import PagedCache, SlotFormat
from kvtile.errors import InvalidArgument


class EncodeReport(NamedTuple):
    """What an encode call stored and what it had to bend."""

    tokens: int  # token-heads written
    skipped: int  # tokens with a negative slot
    non_finite_keys: int  # token-heads whose key holds NaN or infinity
    non_finite_values: int
    norms_saturated: int  # rotated keys with an L2 norm above 65504
    key_elements_clamped: int  # FP8 elements beyond the flavour's largest magnitude
    value_elements_clamped: int  # value elements beyond +-65504


_CPU = _lib.c_string("cpu")


def _where(backend, device):
    """(backend name's address, CUDA stream, device_plus_one) for arrays on `device`."""
    if device is None:
        if backend is None:
            return _CPU, 0, 0
        if backend.split("/")[0] != "cpu":
            raise InvalidArgument(f"backend: got {backend} for arrays on cpu, wanted cpu")
        return _lib.c_string(backend), 0, 0
    if backend is not None and backend.split("/")[0] != "cuda":
        raise InvalidArgument(
            f"backend: got {backend} for arrays on {device_text(device)}, wanted cuda")
    import torch

    stream = torch.cuda.current_stream(device).cuda_stream
    return _lib.c_string(backend or "cuda"), stream, device + 1


def _check_cache(cache, device, writable=False):
    if not isinstance(cache, PagedCache):
        raise InvalidArgument(f"cache: got {type(cache).__name__}, wanted a PagedCache")
    cache.check_alive(writable)
    if cache.device != device:
        raise InvalidArgument(f"cache: got pages on {device_text(cache.device)}, wanted "
                              f"{device_text(device)} like the others")


def _view_on(device, name, a, dtypes, shape, writable=False):
    array = view(name, a, dtypes, shape, writable)
    same_device(name, array, device)
    return array


def encode(key, value, cache: PagedCache, slot_mapping, *, checked: bool = False,
           report: bool = False, backend: str | None = None,
           num_threads: int = 0) -> EncodeReport | None:
    """Stores tokens in the cache.

    key, value: [num_tokens, num_kv_heads, head_dim] float32, float16 or bfloat16, both the same
    (keys after the rotary embedding). slot_mapping: [num_tokens] int64, page * block_size + row;
    negative skips the token; two tokens must not name one slot. checked: raise ValueOverflow or
    NonFinite, writing nothing, instead of storing a bent value. report: return what was bent, host
    arrays only. num_threads: CPU threads, 0 = all.
    Raises InvalidArgument, OutOfRange (a slot beyond the pool; on a GPU it is skipped instead),
    ValueOverflow, NonFinite, Unsupported, Unavailable.
    """
    if not isinstance(cache, PagedCache):
        raise InvalidArgument(f"cache: got {type(cache).__name__}, wanted a PagedCache")
    shape = ("num_tokens", cache.num_kv_heads, cache.head_dim)
    key = view("key", key, FLOATS, shape)
    device, num_tokens = key.device, key.shape[0]
    value = _view_on(device, "value", value, (key.dtype,), (num_tokens, *shape[1:]))
    slots = _view_on(device, "slot_mapping", slot_mapping, (INT64,), (num_tokens,))
    _check_cache(cache, device, writable=True)
    if report and device is not None:
        raise InvalidArgument("report: got True for arrays on a GPU, wanted False")
    name, stream, ordinal = _where(backend, device)
    call = _lib.pack_encode(
        key.dtype, key.ptr, value.ptr, num_tokens, *key.strides[:2], *value.strides[:2],
        slots.ptr, cache.packed, checked, num_threads, name, stream, ordinal, 0)
    if not report:
        check(lib.kvtile_encode(call, None))
        return None
    counts = _lib.EncodeReport()
    check(lib.kvtile_encode(call, ctypes.byref(counts)))
    return EncodeReport(*(getattr(counts, field) for field in EncodeReport._fields))


def decode(cache: PagedCache, slot_mapping, *, dtype="float32", key=None, value=None,
           unrotate_keys: bool = True, backend: str | None = None, num_threads: int = 0):
    """Reads tokens back: (key, value), each [num_tokens, num_kv_heads, head_dim].

    slot_mapping: [num_tokens] int64; negative gives a row of zeros. dtype: of both results, a numpy
    or torch dtype or "float32", "float16", "bfloat16". key, value: contiguous arrays to write
    instead of new ones; their dtype then counts. unrotate_keys: False leaves the keys of the
    rotated presets in the Hadamard space they are stored in.
    Raises InvalidArgument, OutOfRange, Unsupported, Unavailable.
    """
    slots = view("slot_mapping", slot_mapping, (INT64,), ("num_tokens",))
    device, num_tokens = slots.device, slots.shape[0]
    _check_cache(cache, device)
    shape = (num_tokens, cache.num_kv_heads, cache.head_dim)
    given = key if key is not None else value
    code = (dtype_code("dtype", dtype) if given is None else
            view("value" if key is None else "key", given, FLOATS, shape).dtype)
    outs = []
    for label, out in (("key", key), ("value", value)):
        out = empty_like(slot_mapping, shape, code) if out is None else out
        array = _view_on(device, label, out, (code,), shape, writable=True)
        _check_dense(label, array)
        outs.append(array)
    name, stream, ordinal = _where(backend, device)
    check(lib.kvtile_decode(_lib.pack_decode(
        code, cache.packed, slots.ptr, num_tokens, outs[0].ptr, outs[1].ptr, unrotate_keys,
        num_threads, name, stream, ordinal, 0)))
    return outs[0].source, outs[1].source


def _check_dense(name, array):
    wanted = 1
    for size, stride in zip(array.shape[::-1], array.strides[::-1]):
        if size > 1 and stride != wanted:
            raise InvalidArgument(f"{name}: got strides {list(array.strides)} (in elements), "
                                  "wanted a contiguous array")
        wanted *= size


_scratch = threading.local()


def _host_scratch(count):
    """Address of `count` aligned bytes that this thread's next call reuses; it only grows."""
    held = getattr(_scratch, "bytes", None)
    if held is None or held.size < count + WORKSPACE_ALIGNMENT:
        held = _scratch.bytes = np.empty(count + WORKSPACE_ALIGNMENT, np.uint8)
        start = held.ctypes.data
        _scratch.start = start + -start % WORKSPACE_ALIGNMENT
    return _scratch.start


def _head_count(num_heads, cache_heads):
    if num_heads < 1 or num_heads % cache_heads:
        raise InvalidArgument(f"query: got {num_heads} heads, wanted a positive multiple of the "
                              f"cache's {cache_heads}")


def attend(query, cache: PagedCache, block_table, seq_lens, cu_seqlens_q=None, *,
           softmax_scale: float | None = None, causal: bool = True, window: int = 0,
           softcap: float = 0.0, sinks=None, chunk_key=None, chunk_value=None,
           first_positions=None, out=None, lse=None, return_lse: bool = False, workspace=None,
           tile_tokens: int = 0, max_q_len: int = 0, max_seq_len: int = 0,
           batch_invariant: bool = False, backend: str | None = None, num_threads: int = 0,
           report: RunReport | None = None):
    """Exact attention of query rows over a packed cache: decode, verify and prefill alike.

    query: [total_q, num_heads, head_dim] float32, float16 or bfloat16; num_heads is a multiple of
        the cache's num_kv_heads.
    block_table: [num_seqs, max_blocks] int32 pages. seq_lens: [num_seqs] int32 tokens, the current
        chunk included. cu_seqlens_q: [num_seqs + 1] int32, rows of sequence s are
        cu_seqlens_q[s]..cu_seqlens_q[s + 1], its last tokens; None = the same number each.
    softmax_scale: None = head_dim ** -0.5. window: keys a row sees, its own included; 0 = all.
    softcap: 0 = off. sinks: [num_heads] float32 logits of a virtual key with zero value.
    chunk_key, chunk_value: [total_q, num_kv_heads, head_dim] of the query's dtype, the raw keys
        and values of these rows; without them the rows' own tokens are read from the cache.
    first_positions: [num_seqs] int32 position of each table row's first token, for tables that
        start at the window.
    out: array like query, written and returned; None = a new one. lse: [num_heads, total_q]
        float32, natural log; return_lse makes a new one.
    workspace: uint8 of at least workspace_bytes(...) bytes, 64-byte aligned, for this call alone;
        None = the thread's own scratch on the CPU, torch's allocator on a GPU.
    tile_tokens: cached tokens held decoded at once, 0 = 32768; results do not depend on it.
    max_q_len, max_seq_len: upper bounds, 0 = unknown; used on a GPU, where a sequence beyond one
        gives NaN or misses keys and max_q_len decides which engine runs.
    batch_invariant: a row's bits follow from its own query, position and keys, whatever else the
        call holds. Always so on the CPU; on a GPU every row then reads the cache for itself, and
        calls of more than 256 rows x heads of a group a sequence are Unsupported.
    backend: one of backends() or such a name with a variant ("cpu/avx2"); None = by device.
        report: filled in.

    Returns out, or (out, lse) when there is an lse. A row that sees nothing is 0 with lse -inf.
    Raises InvalidArgument, OutOfRange, WorkspaceTooSmall, Unsupported, Unavailable.
    """
    if type(cache) is not PagedCache:
        raise InvalidArgument(f"cache: got {type(cache).__name__}, wanted a PagedCache")
    if cu_seqlens_q is None:
        cu_seqlens_q = _uniform(query, seq_lens)
    if out is None:
        _length("query", query)
        out = empty_like(query, query.shape)
    if lse is None and return_lse:
        lse = empty_like(query, query.shape[1::-1], FLOAT32)
    arrays = (query, out, lse, block_table, cu_seqlens_q, seq_lens, sinks, first_positions,
              chunk_key, chunk_value, workspace)
    try:
        key = tuple(map(layout, arrays))
        plan = cache.plans.get(key)
    except (AttributeError, RuntimeError, TypeError):
        key = plan = None  # something that is no array: _plan says what
    if plan is None:
        plan = _plan(cache, arrays)
        if len(cache.plans) >= MAX_PLANS:
            cache.plans.clear()
        if key is not None:
            cache.plans[key] = plan
    cache.check_alive()
    (dtype, device, num_seqs, num_heads, total_q, max_blocks, table_stride, strides, space_bytes,
     kind, known, needs) = plan
    pointers = addresses(arrays, kind, _WRITTEN)
    (q_ptr, out_ptr, lse_ptr, table_ptr, cu_ptr, lens_ptr, sinks_ptr, first_ptr, chunk_key_ptr,
     chunk_value_ptr, space) = pointers
    # The layout does not tell a freed tensor, read-only memory or an odd address: look again.
    if (pointers.count(0) != known.count(0) or
            (q_ptr | out_ptr | chunk_key_ptr | chunk_value_ptr) & (1 if dtype else 3) or
            (lse_ptr | table_ptr | cu_ptr | lens_ptr | sinks_ptr | first_ptr) & 3):
        _plan(cache, arrays)
    if softmax_scale is None:
        softmax_scale = cache.head_dim**-0.5
    name, stream, ordinal = _where(backend, device)
    if workspace is None:
        shape = (causal, window, softcap, tile_tokens, max_q_len, batch_invariant, name,
                 num_threads)
        space_bytes = needs.get(shape)
        if space_bytes is None:
            space_bytes = needs[shape] = workspace_bytes(
                cache.format, total_q=total_q, num_heads=num_heads,
                num_kv_heads=cache.num_kv_heads, block_size=cache.block_size, num_seqs=num_seqs,
                dtype=DTYPE_NAMES[dtype], chunk=chunk_key is not None, causal=causal,
                window=window, softcap=softcap, sinks=sinks is not None, tile_tokens=tile_tokens,
                max_q_len=max_q_len, batch_invariant=batch_invariant,
                backend=backend or ("cpu" if device is None else "cuda"), device=device,
                num_threads=num_threads)
        if device is None:
            space = _host_scratch(space_bytes)
        else:
            workspace = empty_like(query, (space_bytes,), UINT8)
            space = workspace.data_ptr()
    check(lib.kvtile_attend(
        pack_attention(
            dtype, q_ptr, out_ptr, lse_ptr, num_seqs, num_heads, total_q, softmax_scale, softcap,
            sinks_ptr, causal, batch_invariant, window, cache.packed, table_ptr, max_blocks,
            table_stride, cu_ptr, lens_ptr, first_ptr, chunk_key_ptr, chunk_value_ptr, *strides,
            tile_tokens, max_q_len, max_seq_len, name, num_threads, ordinal, stream, space,
            space_bytes),
        None if report is None else ctypes.byref(report)))
    return out if lse is None else (out, lse)


# Validating every array costs more than a decode call may: its result is kept by the layouts.
MAX_PLANS = 256
_WRITTEN = (1, 2, 10)  # out, lse and workspace among attend()'s arrays


class _Plan(NamedTuple):
    """A validated set of layouts, in the terms of the call struct."""

    dtype: int
    device: int | None
    num_seqs: int
    num_heads: int
    total_q: int
    max_blocks: int
    table_stride: int
    strides: tuple
    workspace_bytes: int
    family: str | None  # which way to the addresses is the short one
    pointers: list  # as of validation
    needs: dict  # workspace bytes by the scalar arguments they depend on


def _plan(cache, arrays):
    (query, out, lse, block_table, cu_seqlens_q, seq_lens, sinks, first_positions, chunk_key,
     chunk_value, workspace) = arrays
    head_dim, num_kv_heads = cache.head_dim, cache.num_kv_heads
    q = view("query", query, FLOATS, ("total_q", "num_heads", head_dim))
    device, (total_q, num_heads, _) = q.device, q.shape
    _head_count(num_heads, num_kv_heads)
    _check_cache(cache, device)
    table = _view_on(device, "block_table", block_table, (INT32,), ("num_seqs", "max_blocks"))
    num_seqs, max_blocks = table.shape
    lens = _view_on(device, "seq_lens", seq_lens, (INT32,), (num_seqs,))
    cu = _view_on(device, "cu_seqlens_q", cu_seqlens_q, (INT32,), (num_seqs + 1,))
    o = _view_on(device, "out", out, (q.dtype,), (total_q, num_heads, head_dim), True)
    lse_ptr = lse_head = lse_token = 0
    if lse is not None:
        lse_ptr, lse_head, lse_token = _lse("lse", lse, device, num_heads, total_q, True)
    sinks_ptr = first_ptr = space = space_bytes = 0
    if sinks is not None:
        sinks_ptr = _view_on(device, "sinks", sinks, (FLOAT32,), (num_heads,)).ptr
    if first_positions is not None:
        first_ptr = _view_on(device, "first_positions", first_positions, (INT32,),
                             (num_seqs,)).ptr
    chunk = (0, 0, 0, 0, 0, 0)
    if chunk_key is not None or chunk_value is not None:
        chunk = _chunk(chunk_key, chunk_value, device, q.dtype, (total_q, num_kv_heads, head_dim))
    if workspace is not None:
        array = _view_on(device, "workspace", workspace, (UINT8,), ("bytes",), True)
        space, space_bytes = array.ptr, array.shape[0]
    return _Plan(
        q.dtype, device, num_seqs, num_heads, total_q, max_blocks, table.strides[0],
        (*q.strides[:2], *o.strides[:2], *chunk[2:], lse_head, lse_token), space_bytes,
        family(arrays),
        [q.ptr, o.ptr, lse_ptr, table.ptr, cu.ptr, lens.ptr, sinks_ptr, first_ptr, *chunk[:2],
         space], {})


def _lse(name, lse, device, num_heads, total_q, writable=False):
    """(address, strides) of an lse; either of its dimensions may be the contiguous one."""
    array = view(name, lse, (FLOAT32,), (num_heads, total_q), writable, any_order=True)
    same_device(name, array, device)
    return array.ptr, *array.strides


def _chunk(key, value, device, dtype, shape):
    if key is None or value is None:
        raise InvalidArgument(f"{'chunk_key' if key is None else 'chunk_value'}: got None, wanted "
                              "both chunk_key and chunk_value, or neither")
    key = _view_on(device, "chunk_key", key, (dtype,), shape)
    value = _view_on(device, "chunk_value", value, (dtype,), shape)
    return key.ptr, value.ptr, *key.strides[:2], *value.strides[:2]


def _length(name, a):
    shape = getattr(a, "shape", ())
    if not shape or not hasattr(a, "dtype"):
        raise InvalidArgument(f"{name}: got {type(a).__name__}, wanted a numpy array or a torch "
                              "tensor")
    return shape[0]


def _uniform(query, seq_lens):
    total_q, num_seqs = _length("query", query), _length("seq_lens", seq_lens)
    if num_seqs < 1 or total_q % num_seqs:
        raise InvalidArgument(f"cu_seqlens_q: got None for {total_q} rows of {num_seqs} "
                              "sequences, wanted offsets")
    step = total_q // num_seqs
    if is_torch(seq_lens):
        import torch

        return torch.arange(num_seqs + 1, dtype=torch.int32, device=seq_lens.device) * step
    return np.arange(num_seqs + 1, dtype=np.int32) * np.int32(step)


def workspace_bytes(format: SlotFormat, *, total_q: int, num_heads: int, num_kv_heads: int,
                    block_size: int, num_seqs: int = 1, dtype="bfloat16", chunk: bool = False,
                    causal: bool = True, window: int = 0, softcap: float = 0.0,
                    sinks: bool = False, tile_tokens: int = 0, max_q_len: int = 0,
                    batch_invariant: bool = False, backend: str = "cpu", device: int | None = None,
                    num_threads: int = 0) -> int:
    """Bytes of scratch that attend() uses for calls of at most these shapes.

    The cached length does not enter: the same bytes serve every context. chunk: whether raw keys
    and values are passed. backend: "cpu", "cuda" or another of backends(); device: CUDA ordinal,
    None = the current one. The other arguments are attend()'s. Raises Unsupported naming the
    parameter when the backend cannot run such a call, so this is the question "is it supported"
    as well; Unavailable when the build or machine lacks the backend.
    """
    if not isinstance(format, SlotFormat):
        raise InvalidArgument(f"format: got {type(format).__name__}, wanted a SlotFormat")
    cache = _lib.pack_cache(0, 0, 0, 0, block_size, num_kv_heads, 0, 0, 0, format.packed)
    # The library reads no pointer here, only whether there is one.
    present = WORKSPACE_ALIGNMENT
    raw = present if chunk else 0
    call = pack_attention(
        dtype_code("dtype", dtype), present, present, present, num_seqs, num_heads, total_q,
        1.0, softcap, present if sinks else 0, causal, batch_invariant, window, cache, present, 0,
        0, present, present, 0, raw, raw, *[0] * 10, tile_tokens, max_q_len, 0,
        _lib.c_string(backend), num_threads, 0 if device is None else device + 1, 0, 0, 0)
    need = ctypes.c_size_t()
    check(lib.kvtile_workspace_bytes(call, ctypes.byref(need)))
    return need.value


def merge_states(states, *, out=None, lse=None, dtype=None, backend: str | None = None,
                 num_threads: int = 0):
    """Merges partial results of the same rows over disjoint sets of keys, exactly.

    states: (out, lse) pairs, out [total_q, num_heads, head_dim] float32, lse [num_heads, total_q]
    float32. out, lse: arrays to write, out of any float dtype (a state's own buffer is allowed);
    None = new ones, out of `dtype` (float32).
    Returns (out, lse). A state with lse -inf counts for nothing and its out is not read.
    Raises InvalidArgument, Unsupported, Unavailable.
    """
    states = list(states)
    if not states:
        raise InvalidArgument("states: got none, wanted at least one (out, lse) pair")
    parts = (_lib.PartialState * len(states))()
    device = shape = None
    for i, (part_out, part_lse) in enumerate(states):
        label = f"states[{i}].out"
        if i == 0:
            array = view(label, part_out, (FLOAT32,), ("total_q", "num_heads", "head_dim"))
            device, shape = array.device, array.shape
        else:
            array = _view_on(device, label, part_out, (FLOAT32,), shape)
        ptr, lse_head, lse_token = _lse(f"states[{i}].lse", part_lse, device, *shape[1::-1])
        parts[i] = _lib.PartialState(
            out=array.ptr, lse=ptr, out_stride_token=array.strides[0],
            out_stride_head=array.strides[1], lse_stride_head=lse_head,
            lse_stride_token=lse_token)
    total_q, num_heads, head_dim = shape
    if out is None:
        out = empty_like(states[0][0], shape,
                         FLOAT32 if dtype is None else dtype_code("dtype", dtype))
    if lse is None:
        lse = empty_like(states[0][0], (num_heads, total_q), FLOAT32)
    o = _view_on(device, "out", out, FLOATS, shape, True)
    lse_ptr, lse_head, lse_token = _lse("lse", lse, device, num_heads, total_q, True)
    name, stream, ordinal = _where(backend, device)
    check(lib.kvtile_merge(_lib.pack_merge(
        o.dtype, ctypes.addressof(parts), len(states), num_heads, total_q, head_dim, num_threads,
        o.ptr, lse_ptr, *o.strides[:2], lse_head, lse_token, name, stream, ordinal, 0)))
    return out, lse
