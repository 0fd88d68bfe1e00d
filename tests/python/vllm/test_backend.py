"""The backend class on the CPU against float64 attention, through the host's own classes.

Layer, cache and batch are built as the host builds them; no model and no scheduler are needed.
"""

import types

import pytest
import torch
from host_fakes import Layer, batch, host_config, pages_for

import kvtile
from kvtile.vllm import backend, host, self_check
from vllm.v1.attention.backend import AttentionType

PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")


def reference(layer, key, value, query, cached_len, *, raw):
    """Float64 attention of one request over what the cache holds, its own chunk raw or packed."""
    impl = layer.impl
    q_len = query.shape[0]
    cache = kvtile.PagedCache.zeros(1, key.shape[0], impl.num_kv_heads,
                                    impl.format_on(key.device), device="cpu")
    slots = torch.arange(key.shape[0])
    kvtile.encode(key, value, cache, slots)
    read_key, read_value = (x.double() for x in kvtile.decode(cache, slots))
    if raw:
        read_key[cached_len:] = key[cached_len:].double()
        read_value[cached_len:] = value[cached_len:].double()
    group = impl.num_heads // impl.num_kv_heads
    read_key, read_value = (x.repeat_interleave(group, 1) for x in (read_key, read_value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), read_key) * impl.scale
    if impl.softcap:
        scores = impl.softcap * torch.tanh(scores / impl.softcap)
    row = cached_len + torch.arange(q_len)[:, None]
    column = torch.arange(key.shape[0])[None]
    hidden = column > row
    if impl.window:
        hidden |= column <= row - impl.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if impl._sinks is not None:
        sinks = impl._sinks.double()[:, None, None].expand(-1, q_len, 1)
        scores = torch.cat([scores, sinks], dim=2)
    weights = scores.softmax(2)[..., :key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, read_value)


def serve(layer, requests, *, block_size, layout="head_major", slot_pad=0, dtype=torch.float32,
          max_rows=2048):
    """Runs one engine step; requests: (cached_len, q_len). Returns (output, wanted) by request.

    The cached part of each request is stored first, as earlier steps would have.
    """
    impl = layer.impl
    generator = torch.Generator().manual_seed(len(requests) * 1000 + block_size)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    pages, tables = pages_for(layer, [sum(r) for r in requests], block_size, layout, slot_pad)
    metadata = batch(layer, requests, tables, block_size, max_rows=max_rows)
    data = []
    for (cached_len, q_len), table in zip(requests, tables):
        total = cached_len + q_len
        key, value = (normal(total, impl.num_kv_heads, impl.head_size) for _ in range(2))
        position = torch.arange(total)
        slots = table[position // block_size].long() * block_size + position % block_size
        impl.do_kv_cache_update(layer, key, value, pages, slots)
        data.append((key, value, normal(q_len, impl.num_heads, impl.head_size), cached_len))
    query = torch.cat([q for _, _, q, _ in data])
    key, value = (torch.cat([d[i][d[3]:] for d in data]) for i in range(2))
    out = torch.full((query.shape[0] + 3, impl.num_heads, impl.head_size), float("nan"),
                     dtype=dtype)
    padding = torch.zeros(3, *query.shape[1:], dtype=dtype)
    impl.forward(layer, torch.cat([query, padding]), key, value, pages, metadata, out)
    assert not out[query.shape[0]:].any(), "padded rows are zeros"
    results, row = [], 0
    for key, value, query, cached_len in data:
        raw = query.shape[0] >= host.RAW_CHUNK_ROWS
        wanted = reference(layer, key, value, query, cached_len, raw=raw)
        results.append((out[row:row + query.shape[0]], wanted, value.abs().max().item()))
        row += query.shape[0]
    return results


def check(results, tolerance=1e-5):
    for got, wanted, largest in results:
        error = (got.double() - wanted).abs().max().item() / largest
        assert error < tolerance, error


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layout", ("head_major", "token_major"))
def test_decode_verify_and_prefill_in_one_batch(preset, layout):
    layer = Layer(preset, 8, 2, 64)
    check(serve(layer, [(300, 1), (40, 4), (0, 1), (70, 128), (200, 129), (0, 150)], block_size=32,
                layout=layout))


def test_whether_the_chunk_is_raw_depends_on_its_rows_alone():
    """The same request of 128 or 129 rows: alone, behind decodes, before and after others."""
    layer = Layer("turboquant_3bit_nc", 4, 1, 128)
    for q_len in (128, 129):
        alone = serve(layer, [(64, q_len)], block_size=16)
        check(alone)
        for others in ([(64, q_len), (500, 1)], [(64, q_len), (10, 300)],
                       [(64, q_len), (9, 2), (0, 200), (5, 5)]):
            check(serve(layer, others, block_size=16))


def test_runs_group_requests_that_are_read_alike():
    starts = [0, 1, 2, 202, 402, 410]
    runs = backend.split_runs(torch.tensor(starts, dtype=torch.int32), starts, 200)
    assert [(r.raw, r.rows, r.requests) for r in runs] == [
        (False, slice(0, 2), slice(0, 2)), (True, slice(2, 402), slice(2, 4)),
        (False, slice(402, 410), slice(4, 5))]
    assert [r.cu_seqlens_q.tolist() for r in runs] == [[0, 1, 2], [0, 200, 400], [0, 8]]


def test_a_uniform_batch_is_one_run_on_the_hosts_own_tensor():
    """A captured graph replays with the addresses it was captured with."""
    starts = torch.arange(0, 36, 4, dtype=torch.int32)
    for invariant in (False, True):
        (run,) = backend.split_runs(starts, starts.tolist(), 4, invariant)
        assert run.cu_seqlens_q is starts and not run.raw
        assert (run.invariant, run.max_q_len) == (invariant, 4)


def test_batch_invariant_runs_share_a_call_only_where_rows_are_few():
    starts = [0, 1, 17, 34, 38, 238, 438]  # 1, 16, 17, 4, 200 and 200 rows
    runs = backend.split_runs(torch.tensor(starts, dtype=torch.int32), starts, 200, True)
    assert [(r.requests, r.raw, r.invariant, r.max_q_len) for r in runs] == [
        (slice(0, 2), False, True, 16), (slice(2, 3), False, False, 17),
        (slice(3, 4), False, True, 16), (slice(4, 5), True, False, 200),
        (slice(5, 6), True, False, 200)]


@pytest.mark.parametrize("block_size", (16, 784, 2096))
def test_block_sizes_of_hybrid_models(block_size):
    check(serve(Layer("turboquant_4bit_nc", 6, 1, 256), [(900, 1), (2100, 3), (0, 140)],
                block_size=block_size))


def test_padded_slots_and_one_kv_head():
    check(serve(Layer("turboquant_k8v4", 7, 1, 128), [(100, 1), (3, 5)], block_size=16,
                slot_pad=60))


@pytest.mark.parametrize("window", (1, 33, 100))
def test_sliding_window_is_honoured(window):
    layer = Layer("turboquant_4bit_nc", 4, 2, 64, sliding_window=window)
    check(serve(layer, [(300, 1), (50, 4), (100, 200)], block_size=16))


def test_soft_cap_and_sinks():
    layer = Layer("turboquant_4bit_nc", 4, 2, 64, logits_soft_cap=5.0,
                  sinks=torch.tensor([0.5, -1.0, 2.0, 4.0]))
    check(serve(layer, [(30, 1), (50, 4), (10, 130)], block_size=16))


@pytest.mark.parametrize("dtype,tolerance", ((torch.float16, 2**-10), (torch.bfloat16, 2**-7)))
def test_16_bit_models(dtype, tolerance):
    check(serve(Layer("turboquant_4bit_nc", 8, 2, 64), [(300, 1), (10, 130)], block_size=32,
                dtype=dtype), tolerance)


def test_the_hosts_measuring_run_is_zeros_and_holds_the_scratch(monkeypatch):
    monkeypatch.setattr(backend, "_own_scratch", {})
    layer = Layer("turboquant_4bit_nc", 4, 2, 64)
    out = torch.full((5, 4, 64), float("nan"))
    layer.impl.forward(layer, torch.randn(5, 4, 64), None, None, None, None, out)
    assert not out.any()
    held = backend._own_scratch[torch.device("cpu")]
    serve(layer, [(0, 200), (50, 1)], block_size=16)
    assert backend._own_scratch[torch.device("cpu")] is held


def test_workspace_does_not_depend_on_the_context():
    layer = Layer("turboquant_4bit_nc", 24, 4, 256)
    needs = {max_model_len: backend.KvtileMetadataBuilder(
        layer.spec(16), [layer.name], host_config(layer, max_model_len=max_model_len),
        torch.device("cpu")).workspace_bytes for max_model_len in (4096, 1 << 20)}
    assert needs[4096] == needs[1 << 20] > 0
    exact = max(kvtile.workspace_bytes(
        kvtile.SlotFormat("4bit_nc", 256), total_q=2048, num_seqs=8, num_heads=24, num_kv_heads=4,
        block_size=16, dtype="float32", chunk=chunk, num_threads=torch.get_num_threads())
        for chunk in (False, True))
    assert needs[4096] == exact


def test_a_batch_larger_than_announced_is_a_typed_error_and_the_next_call_is_right():
    layer = Layer("turboquant_4bit_nc", 4, 2, 64)
    with pytest.raises(kvtile.WorkspaceTooSmall, match="workspace"):
        serve(layer, [(0, 600)], block_size=16, max_rows=1)
    check(serve(layer, [(0, 600)], block_size=16))


def test_a_cache_of_other_heads_is_refused():
    layer = Layer("turboquant_4bit_nc", 4, 2, 64)
    right, wrong = ([4, 2, 16], [4, 16, 2])
    if not host.head_major(backend.KvtileBackend):
        right, wrong = wrong, right
    with pytest.raises(kvtile.InvalidArgument, match="wanted 2 heads"):
        layer.impl.paged(torch.zeros(*wrong, 70, dtype=torch.uint8))
    with pytest.raises(kvtile.InvalidArgument, match="at least 70"):
        layer.impl.paged(torch.zeros(*right, 54, dtype=torch.uint8))


@pytest.mark.parametrize("feature,named", (
    ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
    ({"kv_sharing_target_layer_name": "model.layers.0"}, "KV sharing"),
    ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
    ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
    ({"chunk_lookback": 3}, "chunk_lookback")))
def test_model_features_outside_are_refused_at_start_by_name(feature, named):
    with pytest.raises(NotImplementedError, match=named):
        Layer("turboquant_4bit_nc", 4, 2, 64, **feature)


def test_head_dims_outside_are_refused_at_start_by_name():
    with pytest.raises(kvtile.KvtileError, match="head_dim"):
        Layer("turboquant_4bit_nc", 4, 2, 80)
    Layer("turboquant_k8v4", 4, 2, 80)


def test_what_the_host_is_told():
    assert backend.KvtileBackend.get_name() == "TURBOQUANT"
    assert [size.base for size in backend.KvtileBackend.get_supported_kernel_block_sizes()] == [16]
    assert backend.KvtileBackend.supports_sink()
    assert backend.KvtileBackend.supports_sliding_window()
    assert backend.KvtileBackend.supports_kv_cache_dtype("turboquant_3bit_nc")
    assert not backend.KvtileBackend.supports_kv_cache_dtype("auto")


def test_cache_shapes_are_the_hosts_and_auto_means_the_layers_own_dtype(monkeypatch):
    stock = backend.TurboQuantAttentionBackend
    monkeypatch.setattr(backend.KvtileBackend, "cache_dtype", "")
    monkeypatch.delattr(stock, "get_kv_cache_shape", raising=False)
    with pytest.raises(NotImplementedError):
        backend.KvtileBackend.get_kv_cache_shape(3, 16, 7, 128)
    monkeypatch.setattr(stock, "get_kv_cache_shape", staticmethod(lambda *asked: asked),
                        raising=False)
    Layer("turboquant_3bit_nc", 4, 2, 64)
    shape = backend.KvtileBackend.get_kv_cache_shape
    assert shape(3, 16, 7, 128, cache_dtype_str="auto") == (3, 16, 7, 128, "turboquant_3bit_nc")
    assert shape(3, 16, 7, 128, "turboquant_k8v4") == (3, 16, 7, 128, "turboquant_k8v4")


def test_non_causal_batches_are_refused():
    layer = Layer("turboquant_4bit_nc", 4, 2, 64)
    builder = backend.KvtileMetadataBuilder(layer.spec(16), [layer.name], host_config(layer),
                                            torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="non-causal"):
        builder.build(0, types.SimpleNamespace(causal=False))


def test_self_check_counts_and_finds_a_wrong_result(monkeypatch, caplog):
    monkeypatch.setattr(host, "self_check_interval", lambda: 2)
    for name in self_check.counts:
        monkeypatch.setitem(self_check.counts, name, 0)
    layer = Layer("turboquant_4bit_nc", 4, 2, 64, sliding_window=50, logits_soft_cap=9.0,
                  sinks=torch.tensor([0.5, -1.0, 2.0, 4.0]))
    for requests in ([(300, 1)], [(5, 4)], [(7, 140), (20, 1)], [(0, 30)]):
        check(serve(layer, requests, block_size=16))
    assert self_check.counts == {"calls": 5, "checked": 2, "skipped": 0, "failed": 0}
    honest = kvtile.attend
    monkeypatch.setattr(kvtile, "attend", lambda **call: honest(**call).mul_(1.01))
    serve(layer, [(30, 1)], block_size=16)
    assert self_check.counts["failed"] == 1
