#!/usr/bin/env python3
"""What one call of kvtile.attend costs above the C function it calls.

Inputs: the kvtile package; torch too when it can be imported. One query row over one token, out and
workspace made by the caller; the best of many short loops, since anything else on the machine only
adds. The C function is called through ctypes with the struct of the same call already packed.
"""

import timeit

import numpy as np

import kvtile
from attention import aligned_bytes
from kvtile import _lib, ops


def best(function, loops=3000, calls=20):
    """Microseconds of a call."""
    return min(timeit.repeat(function, number=calls, repeat=loops)) / calls * 1e6


def packed_call(function):
    """The bytes of the attention struct that function() hands to the library."""
    seen = []
    pack = ops.pack_attention
    ops.pack_attention = lambda *values: seen.append(pack(*values)) or seen[-1]
    try:
        function()
    finally:
        ops.pack_attention = pack
    return seen[-1]


def report(name, function):
    direct = best(lambda call=packed_call(function): _lib.check(_lib.lib.kvtile_attend(call, None)))
    whole = best(function)
    print(f"{name:28} {whole - direct:6.2f} us above {direct:.2f} us of the C call")


def main():
    fmt = kvtile.SlotFormat("4bit_nc", 128)
    need = kvtile.workspace_bytes(fmt, total_q=1, num_heads=1, num_kv_heads=1, block_size=16,
                                  dtype="float32", num_threads=1)
    arrays = dict(
        query=np.zeros((1, 1, 128), np.float32), block_table=np.zeros((1, 1), np.int32),
        seq_lens=np.ones(1, np.int32), cu_seqlens_q=np.array([0, 1], np.int32),
        out=np.empty((1, 1, 128), np.float32), workspace=aligned_bytes(need))
    cache = kvtile.PagedCache.zeros(1, 16, 1, fmt)
    report("numpy", lambda: kvtile.attend(cache=cache, num_threads=1, **arrays))
    try:
        import torch
    except ImportError:
        return
    tensors = {name: torch.from_numpy(a) for name, a in arrays.items()}
    pages = kvtile.PagedCache(torch.from_numpy(cache.pages), fmt)
    report("torch", lambda: kvtile.attend(cache=pages, num_threads=1, **tensors))
    del tensors["out"], tensors["workspace"]
    report("torch, out made by the call",
           lambda: kvtile.attend(cache=pages, num_threads=1, **tensors))


if __name__ == "__main__":
    main()
