"""The package over numpy arrays against float64 attention; needs numpy and pytest alone."""

import copy
import threading
import time

import numpy as np
import pytest

import kvtile
from reference import Case, rel_error

PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")


def bfloat16_bits(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def test_presets_and_slot_bytes():
    assert kvtile.presets() == PRESETS
    slots = [kvtile.SlotFormat(p, d).slot_bytes for p in PRESETS for d in (64, 128, 256)]
    assert slots == [100, 196, 388, 70, 134, 262, 62, 118, 230, 54, 102, 198]
    assert kvtile.SlotFormat("turboquant_3bit_nc", 128).scale_offset == 98
    assert kvtile.SlotFormat("k8v4", 64).norm_offset == -1
    assert kvtile.backends()[-1] == "cpu"


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layout", ("token_major", "head_major"))
def test_attend_matches_float64(preset, layout):
    case = Case(preset, seq_lens=(100, 37, 1), q_lens=(5, 1, 1), layout=layout)
    out, lse = case.attend()
    want, want_lse = case.expected()
    assert rel_error(out, want) < 1e-6
    assert np.abs(lse - want_lse).max() < 1e-5


@pytest.mark.parametrize("options", (
    {"window": 7}, {"softcap": 5.0}, {"causal": False},
    {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
    {"window": 20, "softcap": 3.0, "sinks": np.zeros(4, np.float32)}))
@pytest.mark.parametrize("raw_chunk", (False, True))
def test_options_match_float64(options, raw_chunk):
    case = Case(seq_lens=(90, 33), q_lens=(20, 6))
    chunk = dict(zip(("chunk_key", "chunk_value"), case.chunk())) if raw_chunk else {}
    out, lse = case.attend(**options, **chunk)
    want, want_lse = case.expected(**options, raw_chunk=raw_chunk)
    assert rel_error(out, want) < 1e-6
    assert np.abs(lse - want_lse).max() < 1e-5


def test_half_precision_queries():
    case = Case()
    for cast, back in ((np.float16, np.asarray), (bfloat16_bits, from_bits)):
        query = cast(case.query) if cast is bfloat16_bits else case.query.astype(cast)
        out = kvtile.attend(query, case.cache, case.block_table, case.seq_lens)
        assert out.dtype == query.dtype
        case_half = copy.copy(case)
        case_half.query = np.asarray(back(query), np.float32)
        assert rel_error(back(out), case_half.expected()[0]) < 4e-3


def test_strided_arrays_and_preallocated_results():
    case = Case(seq_lens=(64,), q_lens=(8,))
    want, want_lse = case.attend()
    # Queries as [heads, tokens, d] memory, results into every second row of a larger array.
    query = np.ascontiguousarray(case.query.transpose(1, 0, 2)).transpose(1, 0, 2)
    room = np.full((16, 4, 64), np.nan, np.float32)
    lse = np.full((8, 4), np.nan, np.float32).T
    out, got_lse = kvtile.attend(query, case.cache, case.block_table, case.seq_lens,
                                 out=room[::2], lse=lse)
    assert got_lse is lse and np.array_equal(out, want) and np.array_equal(lse, want_lse)
    assert np.isnan(room[1::2]).all() and np.array_equal(room[::2], want)


def test_padded_slots_and_descriptor():
    plain, padded = Case(), Case(padding=58)
    assert np.array_equal(plain.attend()[0], padded.attend()[0])
    assert (padded.cache.pages[..., 70:] == 0xFF).all()
    plain.cache.match_descriptor(plain.cache.descriptor)
    with pytest.raises(kvtile.InvalidArgument, match="stride_block"):
        plain.cache.match_descriptor(padded.cache.descriptor)


@pytest.mark.parametrize("shape", ((1, 16, 1), (1, 1, 2), (3, 1, 1)))
def test_dimensions_of_one(shape):
    fmt = kvtile.SlotFormat("4bit_nc", 64)
    dense = kvtile.PagedCache(np.zeros((*shape, 70), np.uint8), fmt)
    odd = kvtile.PagedCache(
        np.lib.stride_tricks.as_strided(
            dense.pages, dense.pages.shape,
            [1 if n == 1 else s for n, s in zip(shape, dense.pages.strides)] + [1]), fmt)
    assert odd.block_size == shape[1] and odd.num_kv_heads == shape[2]
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 1, shape[2], 64), np.float32)
    kvtile.encode(key, value, odd, np.zeros(1, np.int64))
    assert np.array_equal(kvtile.decode(dense, np.zeros(1, np.int64))[1],
                          kvtile.decode(odd, np.zeros(1, np.int64))[1])


def test_encode_report_and_decode_into():
    case = Case("k8v4")
    key, value = (x.copy() for x in case.raw[0])
    key[3, 1, 5], value[4, 0, 0] = 1e4, np.nan
    slots = case.slots[0].copy()
    slots[7] = -1
    report = kvtile.encode(key, value, case.cache, slots, report=True)
    assert report == (198, 1, 0, 1, 0, 1, 0)
    with pytest.raises(kvtile.ValueOverflow, match="key: got 10000 at token 3 head 1"):
        kvtile.encode(key, value, case.cache, slots, checked=True)
    key[3, 1, 5] = 0
    with pytest.raises(kvtile.NonFinite, match="value: got nan at token 4"):
        kvtile.encode(key, value, case.cache, slots, checked=True)
    half = np.empty((100, 2, 64), np.float16)
    key_out, value_out = kvtile.decode(case.cache, slots, key=half)
    assert key_out is half and value_out.dtype == np.float16 and not half[7].any()


def test_merge_of_parts_is_the_whole():
    case = Case(seq_lens=(96,), q_lens=(1,))
    whole, whole_lse = case.attend()
    parts = []
    for first, last in ((0, 48), (48, 96)):
        table = case.block_table[:, first // 16:last // 16]
        parts.append(kvtile.attend(case.query, case.cache, np.ascontiguousarray(table),
                                   np.array([last - first], np.int32), return_lse=True,
                                   causal=False))
    empty = (np.full_like(whole, np.nan), np.full_like(whole_lse, -np.inf))
    out, lse = kvtile.merge_states([*parts, empty])
    assert rel_error(out, whole) < 1e-6 and np.abs(lse - whole_lse).max() < 1e-5
    assert kvtile.merge_states(parts, dtype="float16")[0].dtype == np.float16


def aligned(count):
    raw = np.empty(count + 64, np.uint8)
    return raw[-raw.ctypes.data % 64:][:count]


def test_workspace_is_exact():
    case = Case(seq_lens=(200,), q_lens=(40,))
    shape = dict(total_q=40, num_heads=4, num_kv_heads=2, block_size=16, dtype="float32")
    need = kvtile.workspace_bytes(case.format, **shape, num_threads=1)
    report = kvtile.RunReport()
    out, _ = case.attend(workspace=aligned(need), num_threads=1, report=report)
    assert report.workspace_bytes == need and report.backend.startswith(b"cpu/")
    assert np.array_equal(out, case.attend()[0])
    with pytest.raises(kvtile.WorkspaceTooSmall, match=f"got {need - 1} bytes, wanted {need}"):
        case.attend(workspace=aligned(need - 1), num_threads=1)
    with pytest.raises(kvtile.Unavailable, match="backend"):
        kvtile.workspace_bytes(case.format, **shape, backend="tpu")


def test_threads_do_not_share_scratch():
    cases = [Case(seq_lens=(300,), q_lens=(64,), seed=seed) for seed in range(4)]
    want = [case.attend()[0] for case in cases]
    failed = []

    def work(i):
        for _ in range(20):
            if not np.array_equal(cases[i].attend()[0], want[i]):
                failed.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_copies_are_apart():
    case = Case()
    twin = copy.deepcopy(case.cache)
    twin.pages[:] = 0
    assert case.cache.pages.any()


def test_call_overhead():
    """bench/python_overhead.py measures it; here only that it stays far from a slow path."""
    case = Case(seq_lens=(1,), q_lens=(1,), num_heads=1, num_kv_heads=1)
    out, workspace = np.empty_like(case.query), aligned(1 << 22)
    best = np.inf
    for _ in range(500):
        start = time.perf_counter()
        for _ in range(10):
            kvtile.attend(case.query, case.cache, case.block_table, case.seq_lens,
                          case.cu_seqlens_q, out=out, workspace=workspace, num_threads=1)
        best = min(best, (time.perf_counter() - start) / 10)
    assert best < 100e-6
