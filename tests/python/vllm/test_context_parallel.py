"""Decode context parallelism, ranks as threads: each holds the tokens that vLLM would give it."""

import threading

import pytest
import torch
from host_fakes import Layer, batch, pages_for
from test_backend import reference

from kvtile.vllm import backend, context_parallel
from vllm.v1.attention.backend import AttentionCGSupport

HEADS, HEAD_DIM, BLOCK = 3, 64, 16


class Group:
    """all_gather between threads."""

    def __init__(self, world_size):
        self.slots = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.rank = threading.local()

    def all_gather(self, tensor, dim):
        self.slots[self.rank.value] = tensor
        self.barrier.wait()
        gathered = torch.cat(self.slots, dim)
        self.barrier.wait()
        return gathered


@pytest.mark.parametrize("world_size,interleave", ((2, 1), (3, 1), (2, 16), (4, 5)))
def test_ranks_together_equal_one(monkeypatch, world_size, interleave):
    # Decode, verify behind a context shorter than its rows, first chunk, continuations whose share
    # is longer and much shorter than the chunk, a context that some ranks hold nothing of.
    requests = [(300, 1), (3, 6), (0, 140), (500, 130), (5, 200), (1, 1)]
    generator = torch.Generator().manual_seed(7)
    data = [tuple(torch.randn(rows, heads, HEAD_DIM, generator=generator) for rows, heads in (
        (c + q, 1), (c + q, 1), (q, HEADS * world_size))) for c, q in requests]
    group, failures = Group(world_size), []
    monkeypatch.setattr(context_parallel, "get_dcp_group", lambda: group)
    scratch = threading.local()
    monkeypatch.setattr(backend, "scratch", lambda device, count: scratch.__dict__.setdefault(
        "bytes", torch.empty(count, dtype=torch.uint8)))
    outs = [None] * world_size

    def serve(rank):
        group.rank.value = rank
        layer = Layer("turboquant_4bit_nc", HEADS, 1, HEAD_DIM, dcp=(world_size, rank))
        lengths = [max(1, sum(r)) for r in requests]
        pages, tables = pages_for(layer, lengths, BLOCK, "head_major", 0)
        metadata = batch(layer, requests, tables, BLOCK, interleave=interleave)
        heads = slice(rank * HEADS, (rank + 1) * HEADS)
        for (key, value, _), table in zip(data, tables):
            position = torch.arange(len(key))
            mine = position // interleave % world_size == rank
            local = position // (world_size * interleave) * interleave + position % interleave
            slots = torch.where(mine, table[local // BLOCK].long() * BLOCK + local % BLOCK, -1)
            layer.impl.do_kv_cache_update(layer, key, value, pages, slots)
        query = torch.cat([query[:, heads] for _, _, query in data])
        key, value = (torch.cat([d[i][c:] for d, (c, _) in zip(data, requests)]) for i in (0, 1))
        outs[rank] = torch.full_like(query, float("nan"))
        layer.impl.forward(layer, query, key, value, pages, metadata, outs[rank])

    def run(rank):
        try:
            serve(rank)
        except BaseException as error:
            failures.append(error)
            group.barrier.abort()

    made = threading.Lock()
    build = Layer.__init__
    monkeypatch.setattr(Layer, "__init__", lambda self, *a, **k: locked(made, build, self, *a, **k))
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    whole = Layer("turboquant_4bit_nc", HEADS * world_size, 1, HEAD_DIM)
    got, row = torch.cat(outs, 1).double(), 0
    for (key, value, query), (cached_len, q_len) in zip(data, requests):
        wanted = reference(whole, key, value, query, cached_len, raw=True)
        error = (got[row:row + q_len] - wanted).abs().max() / value.abs().max()
        assert error < 1e-5, (cached_len, q_len, error)
        row += q_len


def locked(lock, call, *args, **kwargs):
    with lock:
        return call(*args, **kwargs)


@pytest.mark.parametrize("feature,named", (({"sliding_window": 64}, "sliding window"),
                                           ({"sinks": torch.zeros(4)}, "sinks")))
def test_what_needs_positions_or_counts_once_is_refused(feature, named):
    with pytest.raises(NotImplementedError, match=f"{named} under context parallelism"):
        Layer("turboquant_4bit_nc", 4, 1, 64, dcp=(2, 0), **feature)


def test_graphs_are_left_out():
    config = type("Config", (), {"parallel_config": type("Parallel", (), {
        "decode_context_parallel_size": 2})})
    assert backend.KvtileMetadataBuilder.get_cudagraph_support(config, None) is (
        AttentionCGSupport.NEVER)
