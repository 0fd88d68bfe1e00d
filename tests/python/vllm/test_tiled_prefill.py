"""The tiled continuation prefill inside vLLM's own backend class.

Its Triton and flash attention kernels need a GPU: stand-ins take their places and arguments. The
class, its buffers and its workspace manager are the host's.
"""

import types

import pytest
import torch
import vllm.v1.worker.workspace as workspace
from host_fakes import Layer, host_config
from vllm.v1.attention.backends import turboquant_attn as stock

import kvtile
from kvtile.vllm import host, install_tiled_continuation_prefill, tiled_prefill, uninstall

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16
calls = []


def flash(*, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
          fa_version=None, return_softmax_lse=False):
    assert cu_seqlens_q.tolist() == [0, len(q)] and cu_seqlens_k.tolist() == [0, len(k)]
    calls.append((len(q), len(k), causal))
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1).double() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), key) * softmax_scale
    if causal:
        hidden = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(2), value).to(q.dtype)
    return (out, scores.logsumexp(2).float()) if return_softmax_lse else out


class Dequant:
    """In the place of the Triton kernel: decodes the table's first tokens into both buffers."""

    def __getitem__(self, grid):
        def launch(kv_cache, block_table, centroids, key, value, *_, **constants):
            num_tokens = key.shape[2]
            assert grid == (num_tokens, KV_HEADS)
            cache = kvtile.PagedCache(kv_cache, kvtile.SlotFormat("4bit_nc", HEAD_DIM))
            position = torch.arange(num_tokens)
            slots = block_table[0, position // BLOCK].long() * BLOCK + position % BLOCK
            for buffer, read in zip((key, value), kvtile.decode(cache, slots, unrotate_keys=False)):
                buffer[0] = read.transpose(0, 1).half()

        return launch


@pytest.fixture
def host_class(monkeypatch):
    monkeypatch.setattr(stock, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(stock, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setattr(stock, "_tq_full_dequant_kv", Dequant())
    monkeypatch.setattr(stock, "_use_fp8_e4b15", lambda device: 0)
    monkeypatch.setattr(stock, "triton", types.SimpleNamespace(next_power_of_2=lambda n: n))
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(torch.device("cpu")))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    calls.clear()
    yield stock.TurboQuantAttentionImpl
    uninstall()


def continuation(cached_len, q_len=150):
    """(output, largest buffer the host's workspace came to)."""
    layer = Layer("turboquant_4bit_nc", HEADS, KV_HEADS, HEAD_DIM,
                  impl=stock.TurboQuantAttentionImpl)
    impl = layer.impl
    impl._ensure_on_device(layer, torch.device("cpu"))
    generator = torch.Generator().manual_seed(cached_len)
    total = cached_len + q_len
    key, value = (torch.randn(total, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    query = torch.randn(q_len, HEADS, HEAD_DIM, generator=generator)
    num_blocks = -(-total // BLOCK)
    table = torch.randperm(num_blocks, generator=generator).to(torch.int32)[None]
    pages = torch.zeros(num_blocks, BLOCK, KV_HEADS, 70, dtype=torch.uint8)
    position = torch.arange(total)
    kvtile.encode(key, value, kvtile.PagedCache(pages, kvtile.SlotFormat("4bit_nc", HEAD_DIM)),
                  table[0, position // BLOCK].long() * BLOCK + position % BLOCK)
    out = impl._continuation_prefill(layer, query, key[cached_len:], value[cached_len:], pages,
                                     table, cached_len, total, layer._tq_Pi, layer._tq_centroids)
    manager = workspace.current_workspace_manager()
    return out, max(w.numel() for w in manager._current_workspaces if w is not None)


def test_tiles_equal_one_shot_and_bound_the_buffers(host_class):
    one_shot, whole = continuation(1000)
    assert calls == [(150, 1150, True)]
    workspace._manager = workspace.WorkspaceManager(torch.device("cpu"))
    calls.clear()
    assert install_tiled_continuation_prefill(tile_tokens=250) is True  # 256: whole blocks
    tiled, bounded = continuation(1000)
    assert calls == [(150, 150, True), (150, 256, False), (150, 256, False), (150, 256, False),
                     (150, 232, False)]
    # The stock form rotates keys back in fp16, in both cases.
    assert (tiled - one_shot).abs().max() < 2e-5
    assert (whole, bounded) == tuple(2 * n * KV_HEADS * HEAD_DIM * 2 for n in (1008, 256))


def test_contexts_within_a_tile_keep_the_stock_path(host_class):
    wanted, _ = continuation(256)
    install_tiled_continuation_prefill(tile_tokens=256)
    calls.clear()
    got, _ = continuation(256)
    assert calls == [(150, 406, True)] and torch.equal(got, wanted)


def test_hosts_without_flash_attention_keep_the_stock_path_and_reservation(host_class, monkeypatch):
    monkeypatch.setattr(stock, "_HAS_FLASH_ATTN", False)
    wanted, _ = continuation(700)
    stock_bytes = reserved(1 << 16)
    install_tiled_continuation_prefill(tile_tokens=256)
    got, _ = continuation(700)
    assert torch.equal(got, wanted) and reserved(1 << 16) == stock_bytes


def reserved(max_model_len):
    workspace._manager = workspace.WorkspaceManager(torch.device("cpu"))
    layer = Layer("turboquant_4bit_nc", HEADS, KV_HEADS, HEAD_DIM)
    builder = stock.TurboQuantMetadataBuilder(
        layer.spec(BLOCK), [layer.name], host_config(layer, max_model_len=max_model_len),
        torch.device("cpu"))
    assert builder.vllm_config.model_config.max_model_len == max_model_len
    return workspace.current_workspace_manager()._current_workspaces[0].numel()


def test_the_reservation_is_one_tile_instead_of_the_longest_context(host_class):
    def buffers(tokens):
        return 2 * tokens * KV_HEADS * HEAD_DIM * 2

    assert reserved(1 << 20) == buffers(1 << 20)
    install_tiled_continuation_prefill(tile_tokens=32760)
    assert reserved(1 << 20) == reserved(1 << 17) == buffers(32768)
    assert reserved(8192) == buffers(8192)  # a shorter context needs no whole tile


def test_install_once_and_undo(host_class):
    methods = {name: getattr(host_class, name) for name in ("_continuation_prefill",
                                                            "_flash_attn_varlen")}
    assert uninstall() is False
    assert install_tiled_continuation_prefill() is True
    assert install_tiled_continuation_prefill(tile_tokens=64) is False
    assert host_class._continuation_prefill is not methods["_continuation_prefill"]
    assert uninstall() is True
    assert {name: getattr(host_class, name) for name in methods} == methods
    assert not tiled_prefill._stock


def test_bad_tile_and_untested_version_leave_the_class_alone(host_class, monkeypatch):
    before = dict(vars(host_class))
    with pytest.raises(ValueError, match="tile_tokens: got 0, wanted >= 1"):
        install_tiled_continuation_prefill(tile_tokens=0)
    monkeypatch.setattr(host, "version", lambda: "0.99.0")
    with pytest.raises(RuntimeError, match="0.99.0 is outside the tested range"):
        install_tiled_continuation_prefill()
    assert dict(vars(host_class)) == before
