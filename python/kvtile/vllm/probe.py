"""Start-up probe: what the host's store writes, kvtile reads back as the same keys and values.

It runs through the layer's own `do_kv_cache_update` into a small cache of the host's shape, so a
host whose bytes, page order or FP8 flavour are not those kvtile was told is refused at start.
"""

import torch

import kvtile
from kvtile.vllm import host

# Relative RMS error of normal random keys and values: the coarsest preset stays under 0.25, bytes
# read in another order or flavour come out above 0.9.
MAX_ERROR = 0.4
_passed: set[tuple] = set()


def probe_store(layer, block_size, dtype, device):
    """RuntimeError naming what was read when the store and kvtile disagree. Once per process and
    shape."""
    impl = layer.impl
    what = (impl.kv_cache_dtype, impl.head_size, impl.num_kv_heads, block_size, dtype, str(device))
    if what in _passed:
        return
    num_tokens = min(block_size, 16)
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(num_tokens, impl.num_kv_heads, impl.head_size, generator=generator)
                  .to(device, dtype) for _ in range(2))
    slots = torch.arange(block_size, block_size + num_tokens, device=device)
    pages = torch.zeros(2, block_size, impl.num_kv_heads, impl.tq_config.slot_size_aligned,
                        dtype=torch.uint8, device=device)
    if host.head_major(layer.attn_backend):
        pages = pages.transpose(1, 2)
    impl.do_kv_cache_update(layer, key, value, pages, slots)
    cache = impl.paged(pages)
    for name, raw, read in zip(("keys", "values"), (key, value), kvtile.decode(cache, slots)):
        error = ((read - raw.float()).pow(2).mean() / raw.float().pow(2).mean()).sqrt().item()
        if not error < MAX_ERROR:
            raise RuntimeError(
                f"kvtile: the {name} of vLLM {host.version()}'s store read back with a relative "
                f"error of {error:.2f}, wanted under {MAX_ERROR}, as {cache.descriptor}; the "
                "host's bytes are not those kvtile knows. KVTILE_VLLM=0 turns kvtile off")
    if pages[0].any():
        raise RuntimeError("kvtile: the host's store wrote outside its slots in the start-up probe")
    _passed.add(what)
