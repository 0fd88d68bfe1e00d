"""Torch tensors: the same results as numpy, operators under torch.compile, bad tensors refused."""

import numpy as np
import pytest
import torch

import kvtile
import kvtile.torch
from reference import Case, rel_error

PRESET = "4bit_nc"


def tensors(case):
    return [torch.from_numpy(a) for a in (case.query, case.block_table, case.seq_lens,
                                          case.cu_seqlens_q)]


def torch_cache(case):
    return kvtile.PagedCache(torch.from_numpy(case.cache.pages), case.format)


@pytest.fixture
def case():
    return Case(PRESET, seq_lens=(100, 37), q_lens=(5, 1))


def test_same_bits_as_numpy(case):
    query, table, lens, cu = tensors(case)
    want, want_lse = case.attend()
    out, lse = kvtile.attend(query, torch_cache(case), table, lens, cu, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert np.array_equal(out, want) and np.array_equal(lse, want_lse)
    key, value = kvtile.decode(torch_cache(case), torch.from_numpy(case.slots[0]))
    assert np.array_equal(key, case.decoded[0][0]) and np.array_equal(value, case.decoded[0][1])


def test_bfloat16(case):
    query, table, lens, cu = tensors(case)
    half = query.bfloat16()
    out = kvtile.attend(half, torch_cache(case), table, lens, cu)
    case.query = half.float().numpy()
    assert out.dtype == torch.bfloat16
    assert rel_error(out.float().numpy(), case.expected()[0]) < 4e-3
    bits = kvtile.attend(half.view(torch.int16).numpy().view(np.uint16), case.cache,
                         case.block_table, case.seq_lens, case.cu_seqlens_q)
    assert np.array_equal(bits, out.view(torch.int16).numpy().view(np.uint16))


def test_nothing_is_copied(case):
    query, table, lens, cu = tensors(case)
    wide = torch.zeros(6, 8, 128)
    wide[:, ::2, :64] = query
    room = torch.full((6, 4, 128), float("nan"))
    out = kvtile.attend(wide[:, ::2, :64], torch_cache(case), table, lens, cu,
                        out=room[..., 64:])
    assert out.data_ptr() == room.data_ptr() + 64 * 4
    assert np.array_equal(out, case.attend()[0]) and bool(room[..., :64].isnan().all())


def operators(query, key, value, pages, slots, table, lens, cu):
    torch.ops.kvtile.encode(key, value, pages, slots, PRESET)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], query.shape[0])
    torch.ops.kvtile.attend(query * 1.5, out, pages, table, lens, cu, PRESET, lse=lse, window=50)
    read = torch.empty_like(key), torch.empty_like(value)
    torch.ops.kvtile.decode(pages, slots, *read, PRESET)
    merged = torch.empty_like(out), torch.empty_like(lse)
    torch.ops.kvtile.merge_states([out, out], [lse, lse], *merged)
    return out + 1, lse, *read, *merged, pages


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_graph_has_the_eager_bits(case, backend):
    query, table, lens, cu = tensors(case)
    key, value = map(torch.from_numpy, case.raw[0])
    inputs = (query, key, value, torch.from_numpy(case.cache.pages.copy()),
              torch.from_numpy(case.slots[0]), table, lens, cu)
    want = [x.clone() for x in operators(*inputs)]
    inputs[3].fill_(0xFF)
    compiled = torch.compile(operators, fullgraph=True, backend=backend)
    torch.ops.kvtile.encode(*map(torch.from_numpy, case.raw[1]), inputs[3],
                            torch.from_numpy(case.slots[1]), PRESET)
    got = compiled(*inputs)
    for x, y in zip(got[:-1], want[:-1]):
        assert torch.equal(x, y)


def test_operators_keep_their_schema(case):
    query, table, lens, cu = tensors(case)
    out, lse = torch.empty_like(query), torch.empty(4, 6)
    pages = torch.from_numpy(case.cache.pages)
    torch.library.opcheck(torch.ops.kvtile.attend.default,
                          (query, out, pages, table, lens, cu, PRESET), {"lse": lse})
    key, value = map(torch.from_numpy, case.raw[0])
    torch.library.opcheck(torch.ops.kvtile.encode.default,
                          (key, value, pages, torch.from_numpy(case.slots[0]), PRESET))


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("name, text, change", (
    ("query", "float64", lambda a: {"query": a["query"].double()}),
    ("query", "storage", lambda a: {"query": freed(a["query"])}),
    ("query", "meta", lambda a: {"query": a["query"].to("meta")}),
    ("query", "plain memory", lambda a: {"query": a["query"].to_sparse()}),
    ("query", "contiguous last", lambda a: {"query": a["query"].transpose(1, 2).contiguous()
                                            .transpose(1, 2)}),
    ("query", "positive", lambda a: {"query": a["query"][:1].expand(6, -1, -1)}),
    ("block_table", "int64", lambda a: {"block_table": a["block_table"].long()}),
    ("seq_lens", "storage", lambda a: {"seq_lens": freed(a["seq_lens"])}),
    ("out", "shape", lambda a: {"out": torch.empty(6, 4, 63)}),
    ("out", "positive", lambda a: {"out": torch.empty(1, 4, 64).expand(6, -1, -1)}),
    ("seq_lens", "meta", lambda a: {"seq_lens": a["seq_lens"].to("meta")}),
))
def test_bad_tensors_are_refused(case, name, text, change):
    query, table, lens, cu = tensors(case)
    arguments = dict(query=query, cache=torch_cache(case), block_table=table, seq_lens=lens,
                     cu_seqlens_q=cu)
    want = kvtile.attend(**arguments)
    for _ in range(2):
        with pytest.raises(kvtile.InvalidArgument) as caught:
            kvtile.attend(**{**arguments, **change(arguments)})
        assert caught.value.argument == name and text in str(caught.value)
    assert torch.equal(kvtile.attend(**arguments), want)


def test_a_storage_too_small_is_refused(case):
    query, table, lens, cu = tensors(case)
    query = query.clone()
    query.untyped_storage().resize_(8)
    with pytest.raises(kvtile.InvalidArgument, match="^query: got a tensor whose storage holds 8"):
        kvtile.attend(query, torch_cache(case), table, lens, cu)


def test_a_freed_pool_is_refused(case):
    query, table, lens, cu = tensors(case)
    pages = torch.from_numpy(case.cache.pages).clone()
    cache = kvtile.PagedCache(pages, case.format)
    want = kvtile.attend(query, cache, table, lens, cu)
    pages.untyped_storage().resize_(0)
    for act in (lambda: kvtile.attend(query, cache, table, lens, cu),
                lambda: kvtile.decode(cache, torch.from_numpy(case.slots[0]))):
        with pytest.raises(kvtile.InvalidArgument, match="^pages: got memory that was freed"):
            act()
    assert torch.equal(kvtile.attend(query, torch_cache(case), table, lens, cu), want)
