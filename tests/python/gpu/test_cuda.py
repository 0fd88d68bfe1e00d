"""CUDA tensors on a machine with a GPU: the CPU's results, streams, CUDA graphs, mixed devices.

Not part of `make test-python`, which needs no GPU:
    PYTHONPATH=python KVTILE_LIBRARY=build/cuda/libkvtile.so python3 -m pytest -q tests/python/gpu
"""

import numpy as np
import pytest
import torch

import kvtile
import kvtile.torch
from reference import Case, rel_error

PRESET = "4bit_nc"


class Device:
    """A case's arrays on the GPU; its queries in bfloat16."""

    def __init__(self, case):
        self.query, self.table, self.lens, self.cu = (
            torch.from_numpy(a).cuda()
            for a in (case.query, case.block_table, case.seq_lens, case.cu_seqlens_q))
        self.query = self.query.bfloat16()
        self.cache = kvtile.PagedCache(torch.from_numpy(case.cache.pages).cuda(), case.format,
                                       case.cache.layout)
        case.query = self.query.float().cpu().numpy()

    def attend(self, **options):
        return kvtile.attend(self.query, self.cache, self.table, self.lens, self.cu,
                             return_lse=True, **options)


@pytest.mark.parametrize("preset", ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"))
@pytest.mark.parametrize("layout", ("token_major", "head_major"))
def test_matches_float64(preset, layout):
    case = Case(preset, seq_lens=(300, 37, 1), q_lens=(40, 1, 1), head_dim=128, num_heads=8,
                layout=layout)
    device = Device(case)
    out, lse = device.attend()
    want, want_lse = case.expected()
    assert out.dtype == torch.bfloat16 and out.device.type == "cuda"
    assert rel_error(out.float().cpu(), want) < 4e-3
    assert np.abs(lse.cpu().numpy() - want_lse).max() < 2e-3


def test_encode_and_decode_give_the_host_bytes():
    case = Case(PRESET, seq_lens=(100,), head_dim=128)
    slots = torch.from_numpy(case.slots[0]).cuda()
    pages = torch.full_like(torch.from_numpy(case.cache.pages), 0xFF).cuda()
    cache = kvtile.PagedCache(pages, case.format)
    kvtile.encode(*(torch.from_numpy(x).cuda() for x in case.raw[0]), cache, slots)
    assert np.array_equal(pages.cpu(), case.cache.pages)
    for got, want in zip(kvtile.decode(cache, slots), case.decoded[0]):
        assert np.array_equal(got.cpu(), want)


def test_merge():
    case = Case(PRESET, seq_lens=(96,), q_lens=(1,), head_dim=128)
    whole, whole_lse = case.attend()
    host = (torch.from_numpy(whole), torch.from_numpy(whole_lse))
    empty = (torch.full_like(host[0], float("nan")), torch.full_like(host[1], -torch.inf))
    out, lse = kvtile.merge_states([tuple(x.cuda() for x in part) for part in (host, empty)])
    assert torch.equal(out.cpu(), host[0]) and torch.equal(lse.cpu(), host[1])


def test_runs_on_the_current_stream_and_in_a_graph():
    case = Case(PRESET, seq_lens=(300, 200), q_lens=(1, 1), head_dim=128, num_heads=8)
    device = Device(case)
    want, want_lse = device.attend()
    out, lse = torch.empty_like(device.query), torch.empty(8, 2, device="cuda")
    need = kvtile.workspace_bytes(case.format, total_q=2, num_heads=8, num_kv_heads=2,
                                  block_size=16, num_seqs=2, max_q_len=1, backend="cuda")
    workspace = torch.empty(need, dtype=torch.uint8, device="cuda")
    # The first call ever made inside a capture is right: there is no warm-up.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.kvtile.attend(device.query, out, device.cache.pages, device.table, device.lens,
                                device.cu, PRESET, lse=lse, workspace=workspace, max_q_len=1)
    for _ in range(2):
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        eager = device.attend(max_q_len=1)
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
        device.query.mul_(0.5), device.lens.sub_(7)
    assert want.shape == out.shape and want_lse.shape == lse.shape


def test_batch_invariant_rows_have_the_bits_of_rows_alone():
    case = Case(PRESET, seq_lens=(3000, 200, 64), q_lens=(4, 1, 2), head_dim=128, num_heads=8)
    device = Device(case)
    out, lse = device.attend(batch_invariant=True, max_q_len=4)
    cu, lens = device.cu.tolist(), device.lens.tolist()
    for seq in range(3):
        for row in range(cu[seq], cu[seq + 1]):
            one, one_lse = kvtile.attend(
                device.query[row:row + 1].contiguous(), device.cache,
                device.table[seq:seq + 1].contiguous(),
                device.lens.new_tensor([lens[seq] - (cu[seq + 1] - 1 - row)]),
                batch_invariant=True, return_lse=True)
            assert torch.equal(one[0], out[row]) and torch.equal(one_lse[:, 0], lse[:, row])


def test_compiled():
    case = Case(PRESET, seq_lens=(300,), q_lens=(4,), head_dim=128, num_heads=8)
    device = Device(case)

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def layer(query):
        out = torch.empty_like(query)
        torch.ops.kvtile.attend(query, out, device.cache.pages, device.table, device.lens,
                                device.cu, PRESET)
        return out * 2

    for _ in range(3):
        got = layer(device.query)
    assert torch.equal(got, device.attend()[0] * 2)


def test_mixed_devices_are_refused():
    case = Case(PRESET, head_dim=128)
    device = Device(case)
    want, _ = device.attend()
    for name, change in (("block_table", {"block_table": device.table.cpu()}),
                         ("seq_lens", {"seq_lens": case.seq_lens}),
                         ("out", {"out": torch.empty_like(device.query, device="cpu")}),
                         ("cache", {"cache": case.cache}),
                         ("backend", {"backend": "cpu"})):
        arguments = dict(query=device.query, cache=device.cache, block_table=device.table,
                         seq_lens=device.lens, cu_seqlens_q=device.cu)
        with pytest.raises(kvtile.InvalidArgument) as caught:
            kvtile.attend(**{**arguments, **change})
        assert caught.value.argument == name
    assert torch.equal(device.attend()[0], want)


def test_devices():
    assert kvtile.devices()[0].arch >= 80 and "cuda" in kvtile.backends()
