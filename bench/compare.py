#!/usr/bin/env python3
"""kvtile against what a user would run instead, in one process and the same minutes.

Inputs: the kvtile package of this checkout over the library that KVTILE_LIBRARY names, numpy with
OpenBLAS, PyTorch, and optionally ggml's own test-backend-ops. Results are checked for equality
before anything is timed. Every ratio is taken inside one round, between measurements that lie next
to each other, so a machine that slows down slows both sides; the median over rounds is reported
with the quartiles as its spread.
"""

import argparse
import ctypes
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "python"))

# OpenBLAS is the single-thread GEMM yardstick. A forced core type would slow it down: it is dropped
# in a child process of this script only, and the kernel that then runs is part of the report.
FORCED_BLAS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
CLEAN_ENVIRONMENT = "KVTILE_BENCH_CLEAN"
if __name__ == "__main__" and CLEAN_ENVIRONMENT not in os.environ:
    environment = {k: v for k, v in os.environ.items() if k not in FORCED_BLAS}
    environment.update({CLEAN_ENVIRONMENT: "1", "OPENBLAS_NUM_THREADS": "1"})
    built = "build/cuda" if "--gpu" in sys.argv else "build/bench"
    environment.setdefault("KVTILE_LIBRARY", str(REPOSITORY / built / "libkvtile.so"))
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)

import numpy as np  # noqa: E402

import kvtile  # noqa: E402
from attention import Attention, PackedSequence  # noqa: E402
from kvtile import _lib  # noqa: E402

PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
HEAD_DIM = 128
CACHED = 32768
REL_TOLERANCE = 1e-5
MIB = 2**20


class Unequal(RuntimeError):
    pass


# ---- Timing -------------------------------------------------------------------------------------


def timed(function, at_least_seconds):
    """Seconds of one call, over as many calls as fill at_least_seconds."""
    calls = 0
    start = time.perf_counter()
    while True:
        function()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= at_least_seconds:
            return elapsed / calls


def spread(samples):
    """Median and quartiles."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return statistics.median(samples), low, high


class Table:
    """Rows of one comparison; each row states a value and the bar it has to clear, if any."""

    def __init__(self):
        self.rows = []
        self.backend = None  # the path that prefill took

    def add(self, table, name, samples, unit, ours="", peer="", at_least=None, at_most=None):
        median, low, high = spread(samples)
        met = ((at_least is None or median >= at_least) and
               (at_most is None or median <= at_most))
        self.rows.append({
            "table": table, "name": name, "value": median, "low": low, "high": high, "unit": unit,
            "ours": ours, "peer": peer, "at_least": at_least, "at_most": at_most, "met": met,
            "samples": len(samples)})
        bar = (f">= {at_least:g}" if at_least is not None else
               f"<= {at_most:g}" if at_most is not None else "")
        mark = "" if not bar else "  ok" if met else "  MISSED"
        print(f"  {name:56} {median:9.3f} [{low:.3f}, {high:.3f}] {unit:6} {bar:9}"
              f" {ours:>14} {peer:>18}{mark}", flush=True)


# ---- Inputs and equality ------------------------------------------------------------------------


def level3_bytes():
    path = pathlib.Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(path.read_text().rstrip("K\n")) * 1024 if path.exists() else 32 * MIB


def packed_sequences(preset, num_tokens, num_kv_heads, rng):
    """Enough copies of one packed cache, in pages shuffled differently, to exceed twice the L3."""
    shape = (num_tokens, num_kv_heads, HEAD_DIM)
    key = rng.standard_normal(shape, np.float32)
    value = rng.standard_normal(shape, np.float32)
    first = PackedSequence(preset, num_tokens, num_kv_heads, HEAD_DIM)
    copies = 1 + 2 * level3_bytes() // first.cache.pages.nbytes
    caches = [first] + [
        PackedSequence(preset, num_tokens, num_kv_heads, HEAD_DIM, seed=i)
        for i in range(1, copies)]
    for cache in caches:
        cache.encode(key, value)
    return caches


def rel_error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check_attention(attention):
    """Sampled rows of attend() against float64 attention over the decoded cache."""
    cache = attention.sequences[0]
    q_len, num_heads, head_dim = attention.query.shape
    group = num_heads // cache.num_kv_heads
    key = np.empty((cache.num_tokens, cache.num_kv_heads, head_dim), np.float32)
    value = np.empty_like(key)
    cache.decode(key, value)
    if attention.chunk:
        key = np.concatenate([key, attention.chunk[0]])
        value = np.concatenate([value, attention.chunk[1]])
    attention.out.fill(np.nan)
    attention.lse.fill(np.nan)
    attention.run(0)
    for head in sorted({0, num_heads // 2, num_heads - 1}):
        rows = sorted({0, q_len // 2, q_len - 1})
        k64 = key[:, head // group].astype(np.float64)
        v64 = value[:, head // group].astype(np.float64)
        for row in rows:
            seen = len(k64) - (q_len - 1 - row) if attention.causal else len(k64)
            scores = k64[:seen] @ attention.query[row, head].astype(np.float64)
            scores *= attention.softmax_scale
            top = scores.max()
            weights = np.exp(scores - top)
            want = weights @ v64[:seen] / weights.sum()
            want_lse = top + np.log(weights.sum())
            error = rel_error(attention.out[row, head].astype(np.float64), want)
            lse_error = abs(float(attention.lse[head, row]) - want_lse) / max(1.0, abs(want_lse))
            if not (error <= REL_TOLERANCE and lse_error <= REL_TOLERANCE):
                raise Unequal(f"attend, row {row}, head {head}: got relative error {error:.2e} "
                              f"(lse {lse_error:.2e}), wanted at most {REL_TOLERANCE:g}")


# ---- Comparisons --------------------------------------------------------------------------------


GEMM_BARS = {("prefill", 4): 0.75, ("prefill", 8): 0.75, ("decode", 8): 0.40}


class Gemm:
    """Single-thread fp32 matrix product of OpenBLAS, 1024 x 1024 x 1024: the core's own rate."""

    SIZE = 1024

    def __init__(self, rng):
        self._a, self._b = rng.standard_normal((2, self.SIZE, self.SIZE), np.float32)
        self._c = np.empty((self.SIZE, self.SIZE), np.float32)
        np.matmul(self._a, self._b, out=self._c)
        want = self._a.astype(np.float64) @ self._b.astype(np.float64)
        if rel_error(self._c, want) > REL_TOLERANCE:
            raise Unequal("OpenBLAS: fp32 matrix product differs from float64")

    def gflops(self):
        seconds = timed(lambda: np.matmul(self._a, self._b, out=self._c), 0.15)
        return 2 * self.SIZE**3 / seconds / 1e9


def compare_gemm(options, table):
    """Share of the GEMM rate of one core, and the gain of two threads."""
    rng = np.random.default_rng(1)
    gemm = Gemm(rng)
    cases = [("prefill", q_len, group) for q_len in (128, 256) for group in (4, 8)]
    cases += [("decode", 1, group) for group in (4, 8)]
    for phase, q_len, group in cases:
        num_heads, num_kv_heads = 32, 32 // group
        caches = packed_sequences(options.preset, CACHED, num_kv_heads, rng)
        query = rng.standard_normal((q_len, num_heads, HEAD_DIM), np.float32)
        chunk = None
        if phase == "prefill":
            chunk = tuple(rng.standard_normal((2, q_len, num_kv_heads, HEAD_DIM), np.float32))
        one, two = (Attention(caches, query, chunk, num_threads=n) for n in (1, 2))
        check_attention(one)
        check_attention(two)
        if phase == "prefill":
            table.backend = one.report.backend.decode()
        shares, gains, ours, peers = [], [], [], []
        for _ in range(options.rounds):
            before = gemm.gflops()
            seconds = timed(one.run, 0.3)
            peer = (before + gemm.gflops()) / 2
            gflops = one.flops() / seconds / 1e9
            gains.append(seconds / timed(two.run, 0.3))
            shares.append(gflops / peer)
            ours.append(gflops)
            peers.append(peer)
        name = f"{phase}, q_len {q_len}, group {group}"
        table.add("gemm", f"{name}: share of GEMM, 1 thread", shares, "",
                  at_least=GEMM_BARS.get((phase, group)),
                  ours=f"{statistics.median(ours):.1f} GFLOP/s",
                  peer=f"{statistics.median(peers):.1f} GFLOP/s")
        if phase == "prefill" and (os.cpu_count() or 1) >= 2:
            table.add("threads", f"{name}: 2 threads over 1", gains, "x", at_least=1.7)


def compare_sdpa(options, table):
    """Decode everything to fp32, then PyTorch's scaled_dot_product_attention on the CPU."""
    import torch

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rng = np.random.default_rng(2)
    q_len, num_heads, num_kv_heads = 256, 32, 8
    group = num_heads // num_kv_heads
    caches = packed_sequences(options.preset, CACHED, num_kv_heads, rng)
    query = rng.standard_normal((q_len, num_heads, HEAD_DIM), np.float32)
    # Every row sees the whole cache on both sides, so that no mask costs PyTorch its fast path.
    attention = Attention(caches, query, causal=False, num_threads=options.threads)
    key = np.empty((CACHED, num_kv_heads, HEAD_DIM), np.float32)
    value = np.empty_like(key)
    key_view, value_view = (torch.from_numpy(x).transpose(0, 1)[None] for x in (key, value))
    query_rows = torch.from_numpy(query)

    def attend_folded():
        """Query heads of one KV head stacked as rows: no copy of K and V."""
        rows = query_rows.view(q_len, num_kv_heads, group, HEAD_DIM).permute(1, 2, 0, 3)
        out = torch.nn.functional.scaled_dot_product_attention(
            rows.reshape(1, num_kv_heads, group * q_len, HEAD_DIM), key_view, value_view)
        return out.view(num_heads, q_len, HEAD_DIM).transpose(0, 1)

    def attend_grouped():
        return torch.nn.functional.scaled_dot_product_attention(
            query_rows.transpose(0, 1)[None], key_view, value_view, enable_gqa=True)[0].transpose(
                0, 1)

    check_attention(attention)
    caches[0].decode(key, value, num_threads=options.threads)
    forms = {"enable_gqa": attend_grouped, "heads folded into rows": attend_folded}
    for name, form in forms.items():
        error = rel_error(attention.out.astype(np.float64), form().numpy().astype(np.float64))
        if not error <= REL_TOLERANCE:
            raise Unequal(f"PyTorch, {name}: got relative error {error:.2e} between the two")
    name = f"q_len {q_len}, 32/8 heads, {CACHED} cached, {options.threads} threads"
    for form_name, form in forms.items():
        ratios, ours, peers, turn = [], [], [], 0
        for _ in range(options.rounds):
            def decode_then_attend():
                nonlocal turn
                caches[turn % len(caches)].decode(key, value, num_threads=options.threads)
                turn += 1
                form()

            before = timed(attention.run, 0.5)
            peer = timed(decode_then_attend, 0.5)
            seconds = (before + timed(attention.run, 0.5)) / 2
            ratios.append(peer / seconds)
            ours.append(seconds)
            peers.append(peer)
        # Stacking the heads of a group as rows by hand is PyTorch's fastest form; the bar holds
        # against it too.
        table.add("sdpa", f"{name}: speed over {form_name}", ratios, "x", at_least=1.3,
                  ours=f"{statistics.median(ours) * 1e3:.0f} ms",
                  peer=f"{statistics.median(peers) * 1e3:.0f} ms")
    dense_bytes = key.nbytes + value.nbytes
    table.add("sdpa", f"{name}: smaller workspace", [dense_bytes / attention.workspace_bytes], "x",
              at_least=50, ours=f"{attention.workspace_bytes / MIB:.2f} MiB",
              peer=f"{dense_bytes / MIB:.0f} MiB")


GGML_BARS = {(1, "q4_0"): 10, (1, "f16"): 2.5, (128, "q4_0"): 10, (128, "f16"): 1.8}


def ggml_seconds(program, q_len, kv_type, mask):
    """Time of one operation as ggml's own program measures it, 32/8 heads."""
    case = (f"hsk={HEAD_DIM},hsv={HEAD_DIM},nh=8,nr23=.4,1.,kv={CACHED},nb={q_len},mask={mask},"
            f"sinks=0,.*type_K={kv_type},type_V={kv_type},")
    output = subprocess.run(
        [program, "perf", "-o", "FLASH_ATTN_EXT", "-b", "CPU", "-p", case],
        check=True, capture_output=True, text=True).stdout
    found = re.findall(r"runs -\s+([0-9.]+) us/run", output)
    if len(found) != 1:
        raise RuntimeError(f"{program}: got {len(found)} results for {case}, "
                           "wanted 1; see bench/README.md for the shapes it needs")
    return float(found[0]) * 1e-6


def compare_ggml(options, table):
    """ggml's CPU flash attention over f16, q8_0 and q4_0, by its own benchmark."""
    rng = np.random.default_rng(3)
    num_threads = os.cpu_count()  # ggml's program takes every core that is online
    num_heads, num_kv_heads = 32, 8
    caches = packed_sequences(options.preset, CACHED, num_kv_heads, rng)
    for q_len in (1, 128):
        query = rng.standard_normal((q_len, num_heads, HEAD_DIM), np.float32)
        attention = Attention(caches, query, causal=False, num_threads=num_threads)
        check_attention(attention)
        # With a mask is how ggml's graphs call it; its random mask hides up to a tenth of the keys.
        for kv_type, mask in itertools.product(("f16", "q8_0", "q4_0"), (1, 0)):
            ratios, ours, peers = [], [], []
            for _ in range(options.ggml_rounds):
                before = timed(attention.run, 1.0)
                peer = ggml_seconds(options.ggml, q_len, kv_type, mask)
                seconds = (before + timed(attention.run, 1.0)) / 2
                ratios.append(peer / seconds)
                ours.append(seconds)
                peers.append(peer)
            name = f"q_len {q_len}, over ggml {kv_type}{'' if mask else ' without mask'}"
            table.add("ggml", f"{name}, {num_threads} threads", ratios, "x",
                      at_least=GGML_BARS.get((q_len, kv_type)) if mask else None,
                      ours=f"{statistics.median(ours) * 1e3:.1f} ms",
                      peer=f"{statistics.median(peers) * 1e3:.1f} ms")


def compare_codec(options, table):
    """Store and read back, one thread: bf16 input and 16- and 32-bit output per second."""
    rng = np.random.default_rng(4)
    num_tokens, num_kv_heads = CACHED, 8
    shape = (num_tokens, num_kv_heads, HEAD_DIM)
    # The upper half of an fp32 word is the bf16 word, rounded toward zero.
    key, value = ((rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
                  for _ in range(2))
    key_out, value_out = np.empty((2, *shape), np.float32)
    for preset in PRESETS:
        cache = PackedSequence(preset, num_tokens, num_kv_heads, HEAD_DIM)
        encode = lambda: cache.encode(key, value, num_threads=1)
        encode()
        rates = [(key.nbytes + value.nbytes) / timed(encode, 0.3) / 1e9
                 for _ in range(options.rounds)]
        table.add("codec", f"encode {preset}, bf16 input", rates, "GB/s", at_least=0.5)
        cache.decode(key_out, value_out, num_threads=1)
        check_codec(preset, key, value, key_out, value_out)
        # uint16 stands for bf16.
        for dtype, dtype_name, unrotate in ((np.float32, "fp32", False),
                                            (np.float16, "fp16", False),
                                            (np.uint16, "bf16", False),
                                            (np.float32, "fp32, un-rotated", True)):
            outputs = [np.empty(shape, dtype) for _ in range(2)]
            decode = lambda: cache.decode(*outputs, unrotate, num_threads=1)
            output_bytes = sum(x.nbytes for x in outputs)
            rates = [output_bytes / timed(decode, 0.3) / 1e9 for _ in range(options.rounds)]
            table.add("codec", f"decode {preset}, {dtype_name} output", rates, "GB/s",
                      at_least=None if unrotate else 1.0)


def check_codec(preset, key, value, key_out, value_out):
    """What was stored comes back within the preset's own loss (3-bit values lose most)."""
    for name, raw, decoded in (("key", key, key_out), ("value", value, value_out)):
        want = (raw[:256].astype(np.uint32) << 16).view(np.float32)
        error = rel_error(decoded[:256].astype(np.float64), want.astype(np.float64))
        if not error <= 0.25:
            raise Unequal(f"{preset} {name}: got relative error {error:.2e} after a round trip")


def measure_workspace(options, table):
    """The largest workspace over a grid of shapes, and its change with the cached length."""

    def need(head_dim, num_heads, num_kv_heads, total_q, cached, preset):
        # The struct itself: the package's workspace_bytes has no argument for a cached length.
        cache = _lib.Cache(num_blocks=-(-(cached + total_q) // 16), block_size=16,
                           num_kv_heads=num_kv_heads,
                           format=_lib.Format.from_buffer_copy(
                               kvtile.SlotFormat(preset, head_dim).packed))
        call = _lib.AttentionCall(
            dtype=_lib.BFLOAT16, num_seqs=1, num_heads=num_heads, total_q=total_q,
            softmax_scale=head_dim**-0.5, causal=1, cache=cache, backend=b"cpu",
            max_blocks=cache.num_blocks, max_seq_len=cached + total_q,
            num_threads=options.threads)
        found = ctypes.c_size_t()
        _lib.check(_lib.lib.kvtile_workspace_bytes(bytes(call), ctypes.byref(found)))
        return found.value

    needs, growth = [], []
    for preset in PRESETS:
        for head_dim in (64, 128, 256, 512):
            for num_heads, num_kv_heads in ((8, 8), (32, 8), (64, 8), (24, 4), (128, 1)):
                for total_q in (1, 16, 128, 1024, 8192, 65536):
                    shape = (head_dim, num_heads, num_kv_heads, total_q)
                    needs.append(need(*shape, 0, preset))
                    growth.append(need(*shape, 2**20, preset) - needs[-1])
    table.add("workspace", f"largest of {len(needs)} shapes, {options.threads} threads",
              [max(needs) / MIB], "MiB", at_most=64)
    table.add("workspace", "growth from 0 to 1,048,576 cached tokens",
              [max(growth, key=abs) / MIB], "MiB", at_most=0)


SECTIONS = {"gemm": compare_gemm, "sdpa": compare_sdpa, "ggml": compare_ggml,
            "codec": compare_codec, "workspace": measure_workspace}


# ---- Report -------------------------------------------------------------------------------------


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def git(*arguments):
    return subprocess.run(["git", "-C", str(REPOSITORY), *arguments], check=True,
                          capture_output=True, text=True).stdout.strip()


def versions(options, table):
    from threadpoolctl import threadpool_info

    blas = [f"{pool['version']} {pool['architecture']}" for pool in threadpool_info()
            if pool["internal_api"] == "openblas"]
    found = {"kvtile": kvtile.version(), "numpy": np.__version__, "openblas": ", ".join(blas)}
    if table.backend:
        found["kvtile_backend"] = table.backend
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].__version__
    if "ggml" in options.sections:
        found["ggml"] = options.ggml_commit or "not stated"
    return found


def uncommitted_changes():
    return bool(git("status", "--porcelain", "--", ":!bench/results", ":!docs"))


def shown_command(options):
    """The command without paths of this machine."""
    words = ["bench/compare.py", "--preset", options.preset, "--rounds", str(options.rounds)]
    if "ggml" in options.sections:
        words += ["--ggml", "PATH_TO/test-backend-ops"]
    if options.check:
        words.append("--check")
    return " ".join(words)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Ratios of kvtile to its peers on this CPU; with "
                                     "--gpu, of its CUDA backends on this GPU (compare_gpu.py).")
    parser.add_argument("--ggml", help="ggml's test-backend-ops, see bench/README.md")
    parser.add_argument("--ggml-commit", default="", help="recorded with the results")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="repeatable")
    parser.add_argument("--preset", choices=PRESETS, default="4bit_nc")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ggml-rounds", type=int, default=3)
    parser.add_argument("--output", help="JSON file, e.g. bench/results/cpu.json")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args()
    options.sections = [name for name in SECTIONS if not options.only or name in options.only]
    if "ggml" in options.sections and not options.ggml:
        if options.only:
            parser.error("--only ggml needs --ggml PATH_TO/test-backend-ops")
        options.sections.remove("ggml")
    return options


def main():
    if "--gpu" in sys.argv:
        import compare_gpu
        return compare_gpu.main([word for word in sys.argv[1:] if word != "--gpu"])
    options = parse_arguments()
    table = Table()
    print(f"{cpu_name()}, {os.cpu_count()} cores; {shown_command(options)}")
    for section in options.sections:
        print(f"{section}: {SECTIONS[section].__doc__.splitlines()[0]}", flush=True)
        SECTIONS[section](options, table)
    found = versions(options, table)
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    if options.output:
        document = {
            "commit": git("rev-parse", "HEAD"),
            "uncommitted_changes": uncommitted_changes(),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "l3_bytes": level3_bytes()},
            "command": shown_command(options), "versions": found, "rows": table.rows}
        pathlib.Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    missed = [row["name"] for row in table.rows if not row["met"]]
    print(f"{len(table.rows)} rows, {len(missed)} bars missed" +
          ("" if not missed else ": " + "; ".join(missed)))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
