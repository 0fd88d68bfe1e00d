"""What surrounds an attention layer in vLLM, as far as the backend looks; none of it computes."""

import types

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

import kvtile
from kvtile.vllm import backend, host

CPU = torch.device("cpu")


class Layer:
    """A layer with the backend's own impl, made under a host configuration."""

    name = "model.layers.0.self_attn.attn"
    attn_backend = backend.KvtileBackend

    def __init__(self, preset, num_heads, num_kv_heads, head_size, *, impl=backend.KvtileImpl,
                 dcp=(1, 0), **features):
        self.shape = (num_heads, num_kv_heads, head_size)
        self.preset = preset
        module = backend.TurboQuantAttentionImpl.__init__.__globals__
        known, module["get_current_vllm_config"] = (
            module["get_current_vllm_config"], lambda: host_config(None))
        try:
            self.impl = impl.__new__(impl)
            self.impl.dcp_world_size, self.impl.dcp_rank = dcp
            self.impl.__init__(num_heads, head_size, head_size**-0.5, num_kv_heads,
                               kv_cache_dtype=preset, **features)
        finally:
            module["get_current_vllm_config"] = known

    def spec(self, block_size):
        _, num_kv_heads, head_size = self.shape
        return FullAttentionSpec(
            block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size,
            dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(self.preset))


def host_config(layer, *, max_model_len=8192, max_rows=2048, max_seqs=8, interleave=1):
    space = types.SimpleNamespace
    return space(
        model_config=space(max_model_len=max_model_len, dtype=torch.float32,
                           get_num_attention_heads=lambda _: layer.shape[0]),
        scheduler_config=space(max_num_batched_tokens=max_rows, max_num_seqs=max_seqs,
                               enable_chunked_prefill=True),
        speculative_config=None,
        cache_config=space(block_size=16),
        parallel_config=space(decode_context_parallel_size=1,
                              cp_kv_cache_interleave_size=interleave),
        attention_config=space(tq_max_kv_splits_for_cuda_graph=32),
        compilation_config=space(static_forward_context={} if layer is None else
                                 {layer.name: layer}))


def pages_for(layer, lengths, block_size, layout, slot_pad):
    """(the host's cache tensor, one table of scattered pages for each length); page 0 is poison."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 1
    _, num_kv_heads, _ = layer.shape
    slot = layer.impl.tq_config.slot_size_aligned + slot_pad
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)) + 1
    ids = list(order.to(torch.int32).split(counts))
    if layout == "token_major":
        pages = torch.full((num_blocks, block_size, num_kv_heads, slot), 255, dtype=torch.uint8)
        if host.head_major(backend.KvtileBackend):
            pages = pages.transpose(1, 2)
    else:
        pages = torch.full((num_blocks, num_kv_heads, block_size, slot), 255, dtype=torch.uint8)
        if not host.head_major(backend.KvtileBackend):
            pages = pages.transpose(1, 2)
    return pages, ids


def batch(layer, requests, tables, block_size, *, max_rows=2048, interleave=1):
    """The backend's metadata of one step."""
    starts = torch.tensor([0, *(q for _, q in requests)]).cumsum(0).to(torch.int32)
    lens = torch.tensor([sum(r) for r in requests], dtype=torch.int32)
    block_table = torch.full((len(requests), max(len(t) for t in tables) + 2), -1,
                             dtype=torch.int32)
    for row, table in zip(block_table, tables):
        row[:len(table)] = table
    builder = backend.KvtileMetadataBuilder(
        layer.spec(block_size), [layer.name],
        host_config(layer, max_rows=max_rows, interleave=interleave), CPU)
    metadata = builder.build(0, CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens,
        num_reqs=len(requests), num_actual_tokens=int(starts[-1]),
        max_query_len=max(q for _, q in requests), max_seq_len=int(lens.max()),
        block_table_tensor=block_table, slot_mapping=torch.empty(0, dtype=torch.int64),
        seq_lens_cpu_upper_bound=lens))
    if max_rows == 1:
        # The buffer is shared and may be larger: only what was announced is to be used.
        backend._own_scratch[CPU] = torch.empty(metadata.workspace_bytes, dtype=torch.uint8)
    return metadata
