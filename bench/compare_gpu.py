"""The GPU half of compare.py: kvtile's CUDA backends beside what a user would run instead.

Inputs: libkvtile.so with CUDA (through its C ABI; KVTILE_LIBRARY names it), PyTorch with CUDA, Triton. Peers: PyTorch's
flash and cuDNN attention over uncompressed K/V; the tiled reference (compare_gpu_peers.py); a
split-KV decode that works per query head. Everything is held against float64 before anything is
timed, in the same process. Times are of the device, by events, each run after the L2 was
swept, what is compared in turns; medians with quartiles. Bars are those of one H200.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import statistics

import torch

import capi
import compare
import compare_gpu_peers as peers

MIB = 2**20
DEVICE = "cuda"
TORCH_DTYPES = {capi.FLOAT32: torch.float32, capi.FLOAT16: torch.float16,
                capi.BFLOAT16: torch.bfloat16}


class Shape:
    def __init__(self, name, num_heads, num_kv_heads, head_dim):
        self.name, self.num_heads, self.num_kv_heads = name, num_heads, num_kv_heads
        self.head_dim, self.group = head_dim, num_heads // num_kv_heads

    def flops(self, q_len, cached):
        return 4 * self.head_dim * self.num_heads * q_len * cached


SHAPE_A = Shape("A", 24, 4, 256)
SHAPE_B = Shape("B", 32, 8, 128)
SHAPE_C = Shape("C", 32, 8, 64)


def tile_backends():
    """Backend rows of this GPU that attend over a dequantised tile."""
    return ["cuda/tile"] + (["cuda/hopper"] if torch.cuda.get_device_capability()[0] == 9 else [])


# ---- Timing -------------------------------------------------------------------------------------


class Clock:
    """Device time of one call after the L2 was overwritten, and what was written went to memory:
    a call pays for its own bytes alone (k8v4 decode of 131,072 tokens: 6 us of 80)."""

    def __init__(self):
        self._sweep = torch.empty(32 * MIB, dtype=torch.int64, device=DEVICE)

    def milliseconds(self, function, times, captured=False):
        """Samples of one call each; short calls as the replay of a captured graph."""
        return self.in_turns([function], times, captured)[0]

    def in_turns(self, functions, times, captured=False):
        """Samples of each function, taken in turns: a clock that drifts, drifts for all."""
        runs = [self._captured(function) if captured else function for function in functions]
        samples = [[] for _ in functions]
        for i in range(1 + times):
            for run, taken in zip(runs, samples):
                self._sweep.zero_()
                self._sweep.sum()  # lines that are read take the place of written ones
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                if i > 0:  # the first round warms up
                    taken.append(begin.elapsed_time(end))
        return samples

    def _captured(self, function):
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def copy_gb_per_s(self, num_bytes=4096 * MIB):
        """The best of the medians of several pairs of buffers: one alone may be 10 % below."""
        medians = []
        for _ in range(5):
            source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=DEVICE).random_()
            target = torch.empty_like(source)
            samples = self.milliseconds(lambda: target.copy_(source), 9)
            medians.append(num_bytes / statistics.median(samples) * 1e-6)
            del source, target
            torch.cuda.empty_cache()
        return max(medians), medians


def ratios(numerators, denominator):
    """Each sample over the other side's median: the spread is of both."""
    return [n / statistics.median(denominator) for n in numerators]


def paired(numerators, denominators):
    """Ratios of samples that were taken in the same round."""
    return [n / d for n, d in zip(numerators, denominators)]


def spread(samples):
    """Of the medians of several calls, relative."""
    medians = [statistics.median(taken) for taken in samples]
    text = " / ".join(f"{m:.2f}" for m in medians) + " ms"
    return (max(medians) - min(medians)) / statistics.median(medians), text


# ---- kvtile -------------------------------------------------------------------------------------


class GpuCache:
    """num_seqs sequences of num_tokens each, in pages handed out in shuffled order."""

    def __init__(self, library, preset, shape, num_tokens, num_seqs=1, extra_tokens=0, key=None,
                 value=None, block_size=16):
        self.library, self.shape, self.preset = library, shape, preset
        self.num_tokens, self.num_seqs = num_tokens, num_seqs
        self.format = library.parse_preset(preset, shape.head_dim)
        self.slot_bytes = library.slot_bytes(self.format)
        self.max_blocks = -(-(num_tokens + extra_tokens) // block_size)
        num_blocks = self.max_blocks * num_seqs
        self.pages = torch.zeros(num_blocks * block_size * shape.num_kv_heads * self.slot_bytes,
                                 dtype=torch.uint8, device=DEVICE)
        self.table = torch.randperm(num_blocks, device=DEVICE).to(torch.int32).view(num_seqs, -1)
        token = torch.arange(num_tokens, device=DEVICE)
        self.slots = (self.table[:, token // block_size].to(torch.int64) * block_size +
                      token % block_size).contiguous()
        self.struct = capi.Cache(layout=capi.TOKEN_MAJOR, pages=self.pages.data_ptr(),
                                 pages_bytes=self.pages.numel(), num_blocks=num_blocks,
                                 block_size=block_size, num_kv_heads=shape.num_kv_heads,
                                 format=self.format)
        rows = (num_tokens, shape.num_kv_heads, shape.head_dim)
        for seq in range(num_seqs):
            k, v = (torch.randn(rows, dtype=torch.bfloat16, device=DEVICE) if x is None else x
                    for x in (key, value))
            self.encode(k, v, seq)

    def encode(self, key, value, seq=0, first=0):
        dtype = next(d for d, t in TORCH_DTYPES.items() if t == key.dtype)
        self.library.encode(capi.EncodeCall(
            dtype=dtype, key=key.data_ptr(), value=value.data_ptr(), num_tokens=key.shape[0],
            slot_mapping=self.slots[seq, first:].data_ptr(), cache=self.struct, backend=b"cuda",
            stream=torch.cuda.current_stream().cuda_stream))

    def decode(self, dtype=capi.FLOAT32, unrotate=True, out=None, seq=0):
        shape = (self.num_tokens, self.shape.num_kv_heads, self.shape.head_dim)
        key, value = out or (torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=DEVICE)
                             for _ in range(2))
        self.library.decode(capi.DecodeCall(
            dtype=dtype, cache=self.struct, slot_mapping=self.slots[seq].data_ptr(),
            num_tokens=self.num_tokens, key=key.data_ptr(), value=value.data_ptr(),
            unrotate_keys=int(unrotate), backend=b"cuda",
            stream=torch.cuda.current_stream().cuda_stream))
        return key, value

    def packed_bytes(self):
        return self.num_seqs * self.num_tokens * self.shape.num_kv_heads * self.slot_bytes


class GpuAttention:
    """attend() over a cache; q_len queries a sequence, with their raw chunk or without."""

    def __init__(self, cache, q_len, backend, dtype=capi.BFLOAT16, chunk=False, tile_tokens=0,
                 query=None, cached=None):
        shape, total_q = cache.shape, q_len * cache.num_seqs
        torch_dtype = TORCH_DTYPES[dtype]
        rows = (total_q, shape.num_heads, shape.head_dim)
        kv_rows = (total_q, shape.num_kv_heads, shape.head_dim)
        self.cache, self.q_len = cache, q_len
        self.query = torch.randn(rows, dtype=torch_dtype, device=DEVICE) if query is None else query
        self.chunk = [torch.randn(kv_rows, dtype=torch_dtype, device=DEVICE) for _ in range(2)] \
            if chunk else None
        self.out = torch.full(rows, math.nan, dtype=torch_dtype, device=DEVICE)
        self.lse = torch.full((shape.num_heads, total_q), math.nan, device=DEVICE)
        cached = cache.num_tokens if cached is None else cached
        seq_len = cached + (q_len if chunk else 0)
        self._cu_seqlens = torch.arange(0, total_q + 1, q_len, dtype=torch.int32, device=DEVICE)
        self._seq_lens = torch.full((cache.num_seqs,), seq_len, dtype=torch.int32, device=DEVICE)
        key, value = (None, None) if self.chunk is None else (x.data_ptr() for x in self.chunk)
        self.call = capi.AttentionCall(
            dtype=dtype, query=self.query.data_ptr(), out=self.out.data_ptr(),
            lse=self.lse.data_ptr(), num_seqs=cache.num_seqs, num_heads=shape.num_heads,
            total_q=total_q, softmax_scale=shape.head_dim**-0.5, causal=int(chunk),
            cache=cache.struct, block_table=cache.table.data_ptr(), max_blocks=cache.max_blocks,
            cu_seqlens_q=self._cu_seqlens.data_ptr(), seq_lens=self._seq_lens.data_ptr(),
            chunk_key=key, chunk_value=value, tile_tokens=tile_tokens, max_q_len=q_len,
            max_seq_len=seq_len, backend=backend.encode())
        self.workspace_bytes = cache.library.workspace_bytes(self.call)
        self._workspace = torch.full((max(self.workspace_bytes, 1),), 255, dtype=torch.uint8,
                                     device=DEVICE)
        self.call.workspace = self._workspace.data_ptr()
        self.call.workspace_bytes = self.workspace_bytes

    def set_cached(self, cached):
        """Fewer cached tokens than the call was made for."""
        self._seq_lens.fill_(cached + self.q_len)
        self.call.max_seq_len = cached + self.q_len

    def run(self):
        self.call.stream = torch.cuda.current_stream().cuda_stream
        self.cache.library.attend(self.call)


# ---- Equality -----------------------------------------------------------------------------------


def exact_rows(key, value, query, rows):
    """float64 attention of [rows, num_heads] sampled query rows over all of key and value."""
    group = query.shape[1] // key.shape[1]
    outs = []
    for head in range(0, query.shape[1], group):
        k, v = (x[:, head // group].double() for x in (key, value))
        q = query[rows, head:head + group].double().reshape(-1, k.shape[1])
        scores = q @ k.T * k.shape[1]**-0.5
        outs.append((scores.softmax(-1) @ v).view(len(rows), group, -1))
    return torch.cat(outs, 1)


def error_of(got, want):
    return float((got.double() - want).norm() / want.norm())


def check(name, got, want, tolerance):
    error = error_of(got, want)
    if not error <= tolerance:
        raise compare.Unequal(f"{name}: got relative error {error:.2e}, wanted {tolerance:g}")


def check_against_cache(name, cache, query, out, tolerance, rows=None):
    """Sampled rows of queries that see the whole cache."""
    rows = rows or sorted({0, query.shape[0] // 2, query.shape[0] - 1})
    key, value = cache.decode()
    check(name, out[rows], exact_rows(key, value, query, rows), tolerance)


# ---- Comparisons --------------------------------------------------------------------------------


def compare_prefill(library, clock, table):
    """Chunks over a long cache: kvtile (causal, raw chunk), PyTorch and the tiled reference."""
    for shape in (SHAPE_A, SHAPE_B):
        for cached in (131072, 1009664):
            key, value = (torch.randn(cached, shape.num_kv_heads, shape.head_dim,
                                      dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
            cache = GpuCache(library, "4bit_nc", shape, cached, extra_tokens=8192, key=key,
                             value=value)
            dense = peers.Dense(key, value)
            for q_len in (1024, 8192):
                seen = GpuAttention(cache, q_len, "cuda/tile")
                seen.run()
                check_against_cache("cuda/tile", cache, seen.query, seen.out, 4e-3)
                rows = [0, q_len - 1]
                exact = exact_rows(key, value, seen.query, rows)
                for backend in ("flash", "cudnn"):
                    check(backend, dense.attend(seen.query, backend)[rows], exact, 2e-2)
                ours = GpuAttention(cache, q_len, "cuda/tile", chunk=True)
                times = 7 if cached < 2**18 else 3 if q_len == 1024 else 2
                calls = {(backend, fold): functools.partial(dense.attend, seen.query, backend, fold)
                         for backend in ("flash", "cudnn") for fold in (True, False)}
                if q_len == 1024:
                    tiled = peers.Tiled(cache)
                    for backend in ("flash", "cudnn"):
                        out, _ = tiled.attend(seen.query, backend)
                        check_against_cache(f"tiled, {backend}", cache, seen.query, out, 2e-2)
                        calls["tiled", backend] = functools.partial(tiled.attend, seen.query,
                                                                    backend)
                kvtile, *samples = clock.in_turns([ours.run, *calls.values()], times)
                taken = dict(zip(calls, samples))
                kvtile_ms = statistics.median(kvtile)
                name = f"{shape.name}, {cached:,} cached, q_len {q_len:,}"
                ours_text = (f"{kvtile_ms:.2f} ms, "
                             f"{shape.flops(q_len, cached) / kvtile_ms * 1e-9:.0f} TFLOP/s")

                def add(peer, samples, at_least):
                    table.add("prefill", f"{name}: speed over {peer}", paired(samples, kvtile), "x",
                              at_least=at_least, ours=ours_text,
                              peer=f"{statistics.median(samples):.2f} ms")

                for backend, bar in (("flash", 1.0), ("cudnn", None)):
                    # The faster of the two forms it offers for grouped heads.
                    add(f"PyTorch {peers.NAMES[backend]}, uncompressed",
                        min((taken[backend, fold] for fold in (True, False)),
                            key=statistics.median), bar)
                if q_len == 1024:
                    for backend, bar in (("flash", 1.25), ("cudnn", None)):
                        add(f"tiled reference on {peers.NAMES[backend]}", taken["tiled", backend],
                            bar)
                    calls = tiled = None
                if q_len == 1024 and cached < 2**18:
                    compare_tiles(cache, "cuda/tile", 0.03, clock, table)
            del cache, dense, key, value, ours, seen
            torch.cuda.empty_cache()


def compare_tiles(cache, backend, bar, clock, table):
    name = f"{cache.shape.name}, {backend}"
    calls = [GpuAttention(cache, 1024, backend, chunk=True, tile_tokens=tile)
             for tile in (8192, 16384, 32768, 65536, 131072)]
    share, text = spread(clock.in_turns([call.run for call in calls], 7))
    table.add("tiles", f"{name}: spread over tiles of 8K to 128K", [share], "", at_most=bar,
              ours=text)
    del calls
    default = GpuAttention(cache, 8192, backend, chunk=True)
    table.add("tiles", f"{name}: scratch of the default tile, q_len 8,192",
              [default.workspace_bytes / MIB], "MiB", at_most=64)


# Share of cuDNN's rate over 131,072 uncompressed tokens, by shape and q_len.
HOPPER_BARS = {("A", 1024): 0.95, ("A", 2048): 0.90, ("A", 8192): 0.90,
               ("B", 1024): 0.90, ("B", 2048): 0.90, ("B", 8192): 0.90,
               ("C", 1024): 0.85, ("C", 2048): 0.85, ("C", 8192): 0.85}
HOPPER_CACHED = 131072


def compare_hopper(library, clock, table):
    """Chunks over the packed cache by wgmma, beside cuDNN over as many uncompressed tokens."""
    for shape in (SHAPE_A, SHAPE_B, SHAPE_C):
        key, value = (torch.randn(HOPPER_CACHED, shape.num_kv_heads, shape.head_dim,
                                  dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        cache = GpuCache(library, "4bit_nc", shape, HOPPER_CACHED, extra_tokens=8192, key=key,
                         value=value)
        dense = peers.Dense(key, value)
        others = [GpuCache(library, preset, shape, HOPPER_CACHED, extra_tokens=8192, key=key,
                           value=value) for preset in compare.PRESETS if preset != "4bit_nc"]
        rates = {}  # cuDNN, FLOP/ms
        for q_len in (1024, 2048, 8192):
            seen = GpuAttention(cache, q_len, "cuda/hopper")
            seen.run()
            check_against_cache("cuda/hopper", cache, seen.query, seen.out, 4e-3)
            check("cuDNN", dense.attend(seen.query, "cudnn")[[0, q_len - 1]],
                  exact_rows(key, value, seen.query, [0, q_len - 1]), 2e-2)
            calls = [GpuAttention(one, q_len, "cuda/hopper", chunk=True)
                     for one in (cache, *(others if q_len >= 2048 else ()))]
            forms = [functools.partial(dense.attend, seen.query, "cudnn", fold)
                     for fold in (True, False)]
            tiled = None
            if shape is not SHAPE_C and q_len != 2048:
                tiled = peers.Tiled(cache)
                check_against_cache("tiled, cudnn", cache, seen.query,
                                    tiled.attend(seen.query, "cudnn")[0], 2e-2)
                forms.append(functools.partial(tiled.attend, seen.query, "cudnn"))
            samples = clock.in_turns([call.run for call in calls] + forms, 7)
            kvtile, peer = samples[0], samples[len(calls):]
            cudnn = min(peer[:2], key=statistics.median)
            flops = shape.flops(q_len, HOPPER_CACHED)
            rates[q_len] = flops / statistics.median(cudnn)
            add_rate(table, shape, HOPPER_CACHED, q_len, kvtile, [flops / s for s in cudnn])
            if q_len >= 2048:
                share, text = spread(samples[:len(calls)])
                table.add("hopper", f"{shape.name}, q_len {q_len:,}: spread over the presets",
                          [share], "", at_most=0.05, ours=text)
            if tiled is not None:
                table.add("hopper", f"{shape.name}, {HOPPER_CACHED:,} cached, q_len {q_len:,}: "
                          "speed over the tiled reference on cuDNN", paired(peer[2], kvtile), "x",
                          at_least=1.2 if q_len == 1024 else 1.0,
                          ours=f"{statistics.median(kvtile):.2f} ms",
                          peer=f"{statistics.median(peer[2]):.2f} ms")
            del calls, forms, tiled
        if shape is SHAPE_A:
            for q_len, bar in ((128, 1.0), (512, 2.6)):
                small = GpuAttention(cache, q_len, "cuda", chunk=True)
                table.add("hopper", f"A, {HOPPER_CACHED:,} cached, q_len {q_len}, as cuda chooses",
                          clock.milliseconds(small.run, 7), "ms", at_most=bar)
        if shape is not SHAPE_C:
            compare_tiles(cache, "cuda/hopper", 0.02, clock, table)
        del cache, dense, others, key, value, seen
        torch.cuda.empty_cache()
        if shape is not SHAPE_C:
            cached = 1009664
            cache = GpuCache(library, "4bit_nc", shape, cached, extra_tokens=8192)
            for q_len, times in ((1024, 3), (8192, 2)):
                ours = GpuAttention(cache, q_len, "cuda/hopper", chunk=True)
                add_rate(table, shape, cached, q_len, clock.milliseconds(ours.run, times),
                         [rates[q_len]] * times)
            del cache, ours
            torch.cuda.empty_cache()


def add_rate(table, shape, cached, q_len, samples, cudnn_rates):
    flops = shape.flops(q_len, cached)
    table.add("hopper", f"{shape.name}, {cached:,} cached, q_len {q_len:,}: share of cuDNN's rate "
              "uncompressed", [flops / s / rate for s, rate in zip(samples, cudnn_rates)], "",
              at_least=HOPPER_BARS[shape.name, q_len],
              ours=f"{flops / statistics.median(samples) * 1e-9:.0f} TFLOP/s",
              peer=f"{statistics.median(cudnn_rates) * 1e-9:.0f} TFLOP/s")


CHOICE_Q_LENS = (1, 2, 4, 5, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def compare_choice(library, clock, table):
    """What backend cuda takes, against every engine that could have served the call."""
    for shape in (SHAPE_A, SHAPE_B):
        for cached in (16384, 131072):
            cache = GpuCache(library, "4bit_nc", shape, cached)
            worst = (0.0, 0, "")
            chosen, slower = {}, []
            for q_len in CHOICE_Q_LENS:
                calls = {}
                for backend in ("cuda", "cuda/rows", *tile_backends()):
                    try:
                        calls[backend] = GpuAttention(cache, q_len, backend)
                    except capi.KvtileError:
                        continue  # not this engine's
                samples = clock.in_turns([call.run for call in calls.values()], 7, captured=True)
                medians = dict(zip(calls, map(statistics.median, samples)))
                chosen[q_len] = medians.pop("cuda")
                best = min(medians, key=medians.get)
                worst = max(worst, (chosen[q_len] / medians[best], q_len, best))
            for low, high in zip(CHOICE_Q_LENS, CHOICE_Q_LENS[1:]):
                slower.append(chosen[low] / chosen[high])
            name = f"{shape.name}, {cached:,} cached, q_len 1 to 1,024"
            table.add("choice", f"{name}: slowest against the best engine", [worst[0]], "x",
                      at_most=1.1, ours=f"q_len {worst[1]}", peer=worst[2])
            # A longer chunk must not be served faster; 3 % is what runs differ by.
            table.add("choice", f"{name}: fewer rows over the next more", [max(slower)], "x",
                      at_most=1.03, ours=" / ".join(f"{t:.2f}" for t in chosen.values()) + " ms")
            del cache, calls
            torch.cuda.empty_cache()


def compare_million(library, clock, table):
    """A prefill of 1,010,000 tokens in chunks of 8,192, one layer of shape A, as cuda chooses."""
    shape, context, step = SHAPE_A, 1010000, 8192
    cache = GpuCache(library, "4bit_nc", shape, context)
    chunks = [(first, min(step, context - first)) for first in range(0, context, step)]
    calls = {}
    for q_len in sorted({q_len for _, q_len in chunks}):
        # Made for the longest context; the lengths are set before each chunk.
        calls[q_len] = GpuAttention(cache, q_len, "cuda", chunk=True, cached=context - q_len)

    def prefill(chunks):
        for first, q_len in chunks:
            call = calls[q_len]
            call.set_cached(first)
            call.run()
            cache.encode(*call.chunk, first=first)

    prefill(chunks[:2] + chunks[-1:])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    prefill(chunks)
    end.record()
    torch.cuda.synchronize()
    first, q_len = chunks[-1]
    last = calls[q_len]
    rows = [0, q_len // 2, q_len - 1]
    key, value = cache.decode()
    for row in rows:
        seen = [torch.cat([packed[:first], raw[:row + 1].float()])
                for packed, raw in zip((key, value), last.chunk)]
        check("last chunk", last.out[[row]], exact_rows(*seen, last.query, [row]), 4e-3)
    seconds = begin.elapsed_time(end) * 1e-3
    flops = 4 * shape.head_dim * shape.num_heads * context * (context + 1) / 2
    table.add("million", f"A, 4bit_nc, {context:,} tokens in chunks of {step:,}: one layer, "
              "attention and store", [seconds], "s", ours=f"{flops / seconds * 1e-12:.0f} TFLOP/s")
    table.add("million", "the same for 16 layers", [16 * seconds / 60], "minutes")


DECODE_BARS = {"4bit_nc": 0.60, "k8v4": 0.70, "3bit_nc": 0.50}


def compare_decode(library, clock, table):
    """One query a sequence, and the largest verify chunk: share of the packed-byte floor."""
    rate, medians = clock.copy_gb_per_s()
    table.add("decode", "device-to-device copy, read plus written: best of 5 medians", [rate],
              "GB/s", peer=f"all {min(medians):.0f} to {rate:.0f}")
    cases = [(shape, preset, cached, 1) for shape in (SHAPE_A, SHAPE_B)
             for preset in DECODE_BARS for cached in (131072, 1009664)]
    cases += [(SHAPE_B, "4bit_nc", 32768, 16), (SHAPE_B, "4bit_nc", 4096, 128)]
    shares = {}
    for shape, preset, cached, num_seqs in cases:
        cache = GpuCache(library, preset, shape, cached, num_seqs)
        ours = GpuAttention(cache, 1, "cuda/rows")
        ours.run()
        check_against_cache("cuda/rows", cache, ours.query[:1], ours.out[:1], 4e-3)
        samples = clock.milliseconds(ours.run, 9, captured=True)
        floor_ms = cache.packed_bytes() / rate * 1e-6
        share = [floor_ms / s for s in samples]
        one = statistics.median(samples)
        batch = f"batch {num_seqs}, " if num_seqs > 1 else ""
        name = f"{shape.name}, {preset}, {batch}{cached:,} cached"
        shares.setdefault((shape.name, preset), statistics.median(share))
        bar = DECODE_BARS[preset]
        if num_seqs > 1:
            bar = 0.85 * min(bar, shares[shape.name, preset])
        table.add("decode", f"{name}: share of the floor", share, "", at_least=round(bar, 2),
                  ours=f"{one * 1e3:.0f} us", peer=f"{floor_ms * 1e3:.0f} us")
        if num_seqs == 1:
            # What the layers of a model do: calls in a row, each over a pool of its own.
            layers = [ours] + [
                GpuAttention(GpuCache(library, preset, shape, cached), 1, "cuda/rows")
                for _ in range(7 if cached == 131072 else 2)]
            in_a_row = clock.milliseconds(lambda: [layer.run() for layer in layers], 9,
                                          captured=True)
            each = [s / len(layers) for s in in_a_row]
            table.add("decode", f"{name}: share of the floor, {len(layers)} layers in a row",
                      [floor_ms / s for s in each], "", ours=f"{statistics.median(each) * 1e3:.0f} us",
                      peer=f"{floor_ms * 1e3:.0f} us")
            del layers
        if num_seqs == 1 and cached == 131072:
            q_len = 32 // shape.group
            verify = GpuAttention(cache, q_len, "cuda/rows")
            verify.run()
            check_against_cache("cuda/rows verify", cache, verify.query, verify.out, 4e-3)
            many = clock.milliseconds(verify.run, 9, captured=True)
            table.add("decode", f"{name}: q_len {q_len} over q_len 1", ratios(many, samples), "x",
                      at_most=1.3, ours=f"{statistics.median(many) * 1e3:.0f} us")
            if preset == "4bit_nc":
                split = peers.SplitDecode(cache)
                check_against_cache("split decode", cache, ours.query, split.attend(ours.query),
                                    1e-2)
                other = clock.milliseconds(lambda: split.attend(ours.query), 5)
                table.add("decode", f"{name}: speed over a split decode by query head",
                          ratios(other, samples), "x", ours=f"{one * 1e3:.0f} us",
                          peer=f"{statistics.median(other) * 1e3:.0f} us")
        del cache, ours
        torch.cuda.empty_cache()


def compare_errors(library, clock, table):
    """Against float64 over the decoded cache, before output rounding, beside the tiled form."""
    rows = list(range(0, 64, 7))
    for shape in (SHAPE_A, SHAPE_B):
        for preset in compare.PRESETS:
            cache = GpuCache(library, preset, shape, 32768)
            key, value = cache.decode()
            tiled = peers.Tiled(cache, tile=8192)
            for kind, gain in (("flat", 1.0), ("peaked", 4.0)):
                query = (gain * torch.randn(64, shape.num_heads, shape.head_dim, device=DEVICE)
                         ).bfloat16()
                want = exact_rows(key, value, query, rows)
                other = error_of(tiled.attend(query, "flash")[0][rows], want)
                for backend in tile_backends():
                    ours = GpuAttention(cache, 64, backend, dtype=capi.FLOAT32,
                                        query=query.float())
                    ours.run()
                    error = error_of(ours.out[rows], want)
                    table.add("error", f"{shape.name}, {preset}, {kind}: error of the tiled "
                              f"reference over {backend}'s", [other / error], "x", at_least=3,
                              ours=f"{error:.1e}", peer=f"{other:.1e}")


def compare_flatness(library, clock, table):
    """Equal scores over constant and uniform values: the error must not grow with the context."""
    for kind in ("constant", "uniform"):
        for shape in (SHAPE_A, SHAPE_B):
            errors = {backend: {} for backend in tile_backends()}
            for cached in (16384, 65536, 262144, 1048576):
                rows = (cached, shape.num_kv_heads, shape.head_dim)
                key = torch.randn(rows, dtype=torch.bfloat16, device=DEVICE)
                value = torch.full_like(key, 0.7) if kind == "constant" else torch.rand_like(key)
                cache = GpuCache(library, "4bit_nc", shape, cached, key=key, value=value)
                query = torch.zeros(64, shape.num_heads, shape.head_dim, device=DEVICE)
                want = cache.decode()[1].double().mean(0).repeat_interleave(shape.group, 0)
                for backend in errors:
                    ours = GpuAttention(cache, 64, backend, dtype=capi.FLOAT32, query=query)
                    ours.run()
                    errors[backend][cached] = error_of(ours.out, want.expand_as(ours.out))
                del key, value, cache, ours
                torch.cuda.empty_cache()
            for backend, by_length in errors.items():
                name = f"{shape.name}, {kind} values, {backend}"
                # Two exact results have no ratio: an fp32 rounding is the least that is told apart.
                table.add("flatness", f"{name}: error at 1M over 16K",
                          [max(by_length[1048576], 6e-8) / max(by_length[16384], 6e-8)], "x",
                          at_most=1.2, ours=" / ".join(f"{e:.1e}" for e in by_length.values()))
                table.add("flatness", f"{name}: largest error, 16K to 1M",
                          [max(by_length.values())], "", at_most=1.5e-3)


def compare_codec(library, clock, table):
    """Store and read back as a share of the copy rate, 8 KV heads; calls in a row, data not in L2."""
    rate, _ = clock.copy_gb_per_s()
    for head_dim in (128, 256):
        for preset in compare.PRESETS:
            for num_tokens in (8192, 32768):
                shape = Shape("", 8, 8, head_dim)
                rows = (num_tokens, 8, head_dim)
                slot_bytes = library.slot_bytes(library.parse_preset(preset, head_dim))
                moved = num_tokens * 8 * (4 * head_dim + slot_bytes)
                sets = []
                for _ in range(1 + 512 * MIB // moved):
                    key, value = (torch.randn(rows, dtype=torch.bfloat16, device=DEVICE)
                                  for _ in range(2))
                    cache = GpuCache(library, preset, shape, num_tokens, key=key, value=value)
                    out = [torch.empty(rows, dtype=torch.float16, device=DEVICE) for _ in range(2)]
                    sets.append((cache, key, value, out))

                def encode():
                    for cache, key, value, _ in sets:
                        cache.encode(key, value)

                def decode():
                    for cache, _, _, out in sets:
                        cache.decode(capi.FLOAT16, False, out)

                for function in (encode, decode):
                    samples = [s / len(sets)
                               for s in clock.milliseconds(function, 9, captured=True)]
                    name = (f"{function.__name__} {preset}, head_dim {head_dim}, "
                            f"{num_tokens:,} tokens")
                    table.add("codec", name, [moved / s * 1e-6 / rate for s in samples], "",
                              at_least=0.6, ours=f"{statistics.median(samples) * 1e3:.1f} us")


SECTIONS = {"prefill": compare_prefill, "decode": compare_decode, "error": compare_errors,
            "flatness": compare_flatness, "codec": compare_codec, "hopper": compare_hopper,
            "choice": compare_choice, "million": compare_million}


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(prog="compare.py --gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="repeatable")
    parser.add_argument("--output", help="JSON file, e.g. bench/results/gpu_h200.json")
    parser.add_argument("--commit", help="recorded with the results; default: git's HEAD")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args(arguments)
    options.sections = [name for name in SECTIONS if not options.only or name in options.only]
    options.shown = "bench/compare.py --gpu" + "".join(f" --only {x}" for x in options.only or ())
    return options


def main(arguments):
    options = parse_arguments(arguments)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    library = capi.Library(os.environ["KVTILE_LIBRARY"])
    properties = torch.cuda.get_device_properties(0)
    clock, table = Clock(), compare.Table()
    print(f"{properties.name}; {options.shown}")
    for name in options.sections:
        print(f"{name}: {SECTIONS[name].__doc__.splitlines()[0]}", flush=True)
        SECTIONS[name](library, clock, table)
        if options.output:
            # After each: what was measured stays when the machine does not.
            document = {
                "commit": options.commit or compare.git("rev-parse", "HEAD"),
                "uncommitted_changes": False if options.commit else compare.uncommitted_changes(),
                "machine": {"gpu": properties.name, "sms": properties.multi_processor_count,
                            "memory_gib": round(properties.total_memory / 2**30)},
                "command": options.shown,
                "versions": {"kvtile": library.version(), "torch": torch.__version__,
                             "cuda": torch.version.cuda,
                             "cudnn": str(torch.backends.cudnn.version()),
                             "triton": peers.triton.__version__},
                "rows": table.rows}
            pathlib.Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    missed = [row["name"] for row in table.rows if not row["met"]]
    print(f"{len(table.rows)} rows, {len(missed)} bars missed" +
          ("" if not missed else ": " + "; ".join(missed)))
    return 1 if options.check and missed else 0
