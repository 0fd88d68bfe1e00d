"""vLLM's own TurboQuant backend, its continuation prefill taken a tile of cached tokens at a time.

The stock backend decodes the whole cached context of a request before each chunk, into buffers
reserved for max_model_len. Here its `_continuation_prefill` is called once a tile, with no rows of
the chunk, so that it decodes that tile alone; the attention at its end is non-causal then and
returns its log-sum-exp, and the partial results merge. The chunk is one causal part of its own.
Only that method, the attention it ends in and `_reserve_workspace` are replaced: decoding, page
layouts and kernels stay the host's.
"""

import threading

from kvtile.vllm import host

_REPLACED = ("_continuation_prefill", "_flash_attn_varlen")
_stock: dict[type, dict[str, object]] = {}
_running = threading.local()  # .tile: the attention being called is a tile's


def install_tiled_continuation_prefill(tile_tokens: int = 32768) -> bool:
    """Bounds the stock backend's continuation prefill by a tile, in this process.

    tile_tokens: cached tokens decoded at once, rounded up to whole blocks. Contexts within a tile,
    and hosts without flash attention, keep the stock path (and those hosts the stock reservation).
    Returns whether it was installed: False when it is already. Raises ValueError for a tile below
    1, RuntimeError outside the tested versions.
    """
    if tile_tokens < 1:
        raise ValueError(f"tile_tokens: got {tile_tokens}, wanted >= 1")
    if _stock:
        return False
    why = host.untested()
    if why is not None:
        raise RuntimeError(f"kvtile: {why}")
    from vllm.v1.attention.backends import turboquant_attn

    impl = turboquant_attn.TurboQuantAttentionImpl
    builder = turboquant_attn.TurboQuantMetadataBuilder
    _stock[impl] = {name: getattr(impl, name) for name in _REPLACED}
    _stock[builder] = {"_reserve_workspace": builder._reserve_workspace}
    impl._continuation_prefill = _tiled(turboquant_attn, _stock[impl], tile_tokens)
    impl._flash_attn_varlen = _attention(turboquant_attn, _stock[impl])
    builder._reserve_workspace = _reservation(turboquant_attn, _stock[builder], tile_tokens)
    return True


def uninstall() -> bool:
    """Puts the stock methods back; returns whether there was anything to undo."""
    undone = bool(_stock)
    for owner, methods in _stock.items():
        for name, method in methods.items():
            setattr(owner, name, method)
    _stock.clear()
    return undone


def _tiled(module, stock, tile_tokens):
    def continuation_prefill(self, layer, query, key_chunk, val_chunk, kv_cache, block_table,
                             cached_len, seq_len, Pi, centroids):
        block_size = kv_cache.shape[1]
        tile = -(-tile_tokens // block_size) * block_size
        if cached_len <= tile or not module._HAS_FLASH_ATTN:
            return stock["_continuation_prefill"](self, layer, query, key_chunk, val_chunk,
                                                  kv_cache, block_table, cached_len, seq_len, Pi,
                                                  centroids)
        offsets = block_table.new_tensor([0, query.shape[0]])  # int32, like every table
        total, total_lse = _flash(module, self, query, key_chunk, val_chunk, offsets, offsets,
                                  query.shape[0], query.shape[0], causal=True)
        total = total.float()
        for begin in range(0, cached_len, tile):
            length = min(tile, cached_len - begin)
            _running.tile = True
            try:
                part, lse = stock["_continuation_prefill"](
                    self, layer, query, key_chunk[:0], val_chunk[:0], kv_cache,
                    block_table[:, begin // block_size:], length, length, Pi, centroids)
            finally:
                _running.tile = False
            total, total_lse = _merge(total, total_lse, part, lse)
        return total.to(query.dtype)

    return continuation_prefill


def _attention(module, stock):
    def flash_attn_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        if not getattr(_running, "tile", False):
            return stock["_flash_attn_varlen"](self, q, k, v, cu_seqlens_q, cu_seqlens_k,
                                               max_seqlen_q, max_seqlen_k)
        return _flash(module, self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                      max_seqlen_k, causal=False)

    return flash_attn_varlen


def _flash(module, impl, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    version = {} if impl.fa_version is None else {"fa_version": impl.fa_version}
    out, lse, *_ = module.flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=impl.scale,
        causal=causal, return_softmax_lse=True, **version)
    return out, lse


def _merge(out, lse, part, part_lse):
    """Both parts see at least one key in every row, so no lse is -inf. out is fp32, in place."""
    total = lse.logaddexp(part_lse)
    out *= (lse - total).exp().t().unsqueeze(-1)
    out += part * (part_lse - total).exp().t().unsqueeze(-1)
    return out, total


class _Capped:
    """An object of the host with some of its attributes answered otherwise."""

    def __init__(self, of, **others):
        self.__dict__.update(others, _of=of)

    def __getattr__(self, name):
        return getattr(self._of, name)


def _reservation(module, stock, tile_tokens):
    def reserve_workspace(self):
        config = self.vllm_config
        if module._HAS_FLASH_ATTN:
            # The stock reservation is for max_model_len - 1 cached tokens, rounded up to blocks.
            longest = min(config.model_config.max_model_len, tile_tokens + 1)
            self.vllm_config = _Capped(
                config, model_config=_Capped(config.model_config, max_model_len=longest))
        try:
            stock["_reserve_workspace"](self)
        finally:
            self.vllm_config = config

    return reserve_workspace
