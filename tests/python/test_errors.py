"""Wrong arguments: a typed exception that names the argument, and the next call right."""

import numpy as np
import pytest

import kvtile
from reference import Case

F32, I32 = np.float32, np.int32


def call(case, **changes):
    arguments = dict(query=case.query, cache=case.cache, block_table=case.block_table,
                     seq_lens=case.seq_lens, cu_seqlens_q=case.cu_seqlens_q)
    return kvtile.attend(**{**arguments, **changes})


def readonly(a):
    a.flags.writeable = False
    return a


def unaligned(shape):
    count = int(np.prod(shape)) * 4
    return np.zeros(count + 2, np.uint8)[2:].view(F32).reshape(shape)


BAD = (
    ("query", "InvalidArgument", "dtype float64", lambda c: {"query": c.query.astype(np.float64)}),
    ("query", "InvalidArgument", "list", lambda c: {"query": c.query.tolist()}),
    ("query", "InvalidArgument", "shape", lambda c: {"query": c.query[0]}),
    ("query", "InvalidArgument", "shape", lambda c: {"query": c.query[..., :32]}),
    ("query", "InvalidArgument", "3 heads", lambda c: {"query": c.query[:, :3]}),
    ("query", "InvalidArgument", "contiguous last",
     lambda c: {"query": np.asfortranarray(c.query)}),
    ("query", "InvalidArgument", "positive",
     lambda c: {"query": np.broadcast_to(c.query[:1], c.query.shape)}),
    ("query", "InvalidArgument", "positive", lambda c: {"query": c.query[::-1]}),
    ("query", "InvalidArgument", "unaligned", lambda c: {"query": unaligned(c.query.shape)}),
    ("query", "InvalidArgument", ">f4", lambda c: {"query": c.query.astype(">f4")}),
    ("cache", "InvalidArgument", "ndarray", lambda c: {"cache": c.cache.pages}),
    ("block_table", "InvalidArgument", "int64",
     lambda c: {"block_table": c.block_table.astype(np.int64)}),
    ("block_table", "InvalidArgument", "shape", lambda c: {"block_table": c.block_table[0]}),
    ("seq_lens", "InvalidArgument", "shape", lambda c: {"seq_lens": np.ones(3, I32)}),
    ("cu_seqlens_q", "InvalidArgument", "shape", lambda c: {"cu_seqlens_q": np.zeros(5, I32)}),
    ("cu_seqlens_q", "InvalidArgument", "None for 4 rows of 3",
     lambda c: {"cu_seqlens_q": None, "seq_lens": np.ones(3, I32)}),
    ("cu_seqlens_q[2]", "InvalidArgument", "<= total_q",
     lambda c: {"cu_seqlens_q": np.array([0, 2, 9], I32)}),
    ("block_table", "OutOfRange", "pages",
     lambda c: {"seq_lens": np.array([100, 4000], I32)}),
    ("block_table[0][0]", "OutOfRange", "0..", lambda c: {"block_table": c.block_table * 0 - 1}),
    ("out", "InvalidArgument", "shape", lambda c: {"out": np.empty((4, 4, 32), F32)}),
    ("out", "InvalidArgument", "dtype", lambda c: {"out": np.empty((4, 4, 64), np.float16)}),
    ("out", "InvalidArgument", "read-only",
     lambda c: {"out": readonly(np.empty((4, 4, 64), F32))}),
    ("lse", "InvalidArgument", "shape", lambda c: {"lse": np.empty((4, 5), F32)}),
    ("sinks", "InvalidArgument", "shape", lambda c: {"sinks": np.zeros(3, F32)}),
    ("chunk_value", "InvalidArgument", "both", lambda c: {"chunk_key": c.chunk()[0]}),
    ("chunk_key", "InvalidArgument", "shape",
     lambda c: {"chunk_key": c.chunk()[0][1:], "chunk_value": c.chunk()[1]}),
    ("chunk_key", "InvalidArgument", "dtype",
     lambda c: {"chunk_key": c.chunk()[0].astype(np.float16), "chunk_value": c.chunk()[1]}),
    ("workspace", "WorkspaceTooSmall", "bytes", lambda c: {"workspace": np.empty(0, np.uint8)}),
    ("workspace", "InvalidArgument", "dtype", lambda c: {"workspace": np.empty(9, F32)}),
    ("window", "InvalidArgument", "-1", lambda c: {"window": -1}),
    ("softcap", "InvalidArgument", "positive", lambda c: {"softcap": float("nan")}),
    ("softmax_scale", "InvalidArgument", "finite",
     lambda c: {"softmax_scale": float("inf")}),
    ("backend", "InvalidArgument", "cuda", lambda c: {"backend": "cuda"}),
    ("num_threads", "InvalidArgument", ">= 0", lambda c: {"num_threads": -1}),
)


@pytest.mark.parametrize("name, kind, text, change", BAD)
def test_attend_refuses(name, kind, text, change):
    case = Case(seq_lens=(100, 30), q_lens=(3, 1))
    want = call(case).copy()
    for _ in range(2):  # a refusal is not remembered as a good layout
        with pytest.raises(getattr(kvtile, kind)) as caught:
            call(case, **change(case))
        assert caught.value.argument == name and text in str(caught.value)
        assert type(caught.value).__name__ == kind
    assert np.array_equal(call(case), want)


def test_a_good_layout_does_not_admit_a_bad_array():
    """The same shapes and strides again, but read-only or unaligned memory."""
    case = Case(seq_lens=(100, 30), q_lens=(3, 1))
    out = np.empty_like(case.query)
    call(case, out=out)
    with pytest.raises(kvtile.InvalidArgument, match="^out: got a read-only"):
        call(case, out=readonly(np.empty_like(out)))
    with pytest.raises(kvtile.InvalidArgument, match="^query: got an unaligned"):
        call(case, query=unaligned(case.query.shape), out=out)
    frozen = case.query.copy()
    frozen.flags.writeable = False
    assert np.array_equal(call(case, query=frozen), call(case))


@pytest.mark.parametrize("name, change", (
    ("key", lambda c: {"key": c.raw[0][0][:, :1]}),
    ("value", lambda c: {"value": c.raw[0][1].astype(np.float16)}),
    ("slot_mapping", lambda c: {"slot_mapping": c.slots[0].astype(np.int32)}),
    ("slot_mapping", lambda c: {"slot_mapping": c.slots[0][1:]}),
    ("cache", lambda c: {"cache": None}),
))
def test_encode_refuses(name, change):
    case = Case()
    before = case.cache.pages.copy()
    arguments = dict(key=case.raw[0][0], value=case.raw[0][1], cache=case.cache,
                     slot_mapping=case.slots[0])
    with pytest.raises(kvtile.InvalidArgument) as caught:
        kvtile.encode(**{**arguments, **change(case)})
    assert caught.value.argument == name
    assert np.array_equal(case.cache.pages, before)
    kvtile.encode(**arguments)
    assert np.array_equal(case.cache.pages, before)


def test_slots_out_of_range():
    case = Case()
    slots = case.slots[0].copy()
    slots[5] = 10**9
    with pytest.raises(kvtile.OutOfRange, match=r"^slot_mapping\[5\]: got 1000000000") as caught:
        kvtile.encode(*case.raw[0], case.cache, slots)
    assert isinstance(caught.value, IndexError)
    with pytest.raises(kvtile.OutOfRange):
        kvtile.decode(case.cache, slots)


def test_read_only_pages():
    case = Case()
    pages = case.cache.pages.copy()
    cache = kvtile.PagedCache(readonly(pages), case.format)
    assert np.array_equal(call(case, cache=cache), call(case))
    with pytest.raises(kvtile.InvalidArgument, match="^pages: got a read-only"):
        kvtile.encode(*case.raw[0], cache, case.slots[0])


@pytest.mark.parametrize("arguments, kind, text", (
    (("4bit_nc", 100), "Unsupported", "head_dim: got 100"),
    (("5bit", 64), "InvalidArgument", "5bit"),
    (("k8v4", 64, "e5m2"), "InvalidArgument", "fp8: got e5m2"),
    (("k8v4", "64"), "InvalidArgument", "head_dim: got '64'"),
    ((4, 64), "InvalidArgument", "preset: got 4"),
))
def test_formats_refused(arguments, kind, text):
    with pytest.raises(kvtile.KvtileError, match=text) as caught:
        kvtile.SlotFormat(*arguments)
    assert type(caught.value).__name__ == kind


@pytest.mark.parametrize("pages, text", (
    (np.zeros((4, 16, 2, 69), np.uint8), "slots of 69 bytes, wanted at least 70"),
    (np.zeros((4, 16, 2, 70), np.int32), "dtype int32"),
    (np.zeros((4, 16, 140), np.uint8), "shape"),
    (np.zeros((4, 16, 2, 140), np.uint8)[..., ::2], "contiguous last"),
    (np.broadcast_to(np.zeros((1, 16, 2, 70), np.uint8), (4, 16, 2, 70)), "positive"),
))
def test_pages_refused(pages, text):
    with pytest.raises(kvtile.InvalidArgument, match=text) as caught:
        kvtile.PagedCache(pages, kvtile.SlotFormat("4bit_nc", 64))
    assert caught.value.argument == "pages"


def test_overlapping_slots_refused():
    pages = np.lib.stride_tricks.as_strided(np.zeros(10000, np.uint8), (4, 16, 2, 70),
                                            (2240, 140, 60, 1))
    with pytest.raises(kvtile.InvalidArgument, match="^stride_head: got 60"):
        kvtile.PagedCache(pages, kvtile.SlotFormat("4bit_nc", 64))


def test_merge_refuses():
    out, lse = np.zeros((3, 2, 64), F32), np.zeros((2, 3), F32)
    for states, name in (([], "states"), ([(out, lse), (out[1:], lse)], "states[1].out"),
                         ([(out, lse.T.copy())], "states[0].lse"),
                         ([(out.astype(np.float16), lse)], "states[0].out")):
        with pytest.raises(kvtile.InvalidArgument) as caught:
            kvtile.merge_states(states)
        assert caught.value.argument == name
