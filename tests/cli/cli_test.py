# Tests of the kvtile command from outside. Usage: cli_test.py KVTILE GROUP. Every group runs the
# command on small files made here and checks exit code, streams and reports; the first surprise
# ends the run with its command line. Standard library only.
import json
import math
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile

KVTILE = os.path.abspath(sys.argv[1])
PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
SLOT_BYTES = {
    64: (100, 70, 62, 54), 128: (196, 134, 118, 102), 256: (388, 262, 230, 198),
    512: (772, 518, 454, 390),
}
REPORT_KEYS = ("backend", "ns_per_query_token_layer", "gflops", "tokens_per_second", "cache_bytes",
               "dense_cache_bytes", "workspace_bytes", "peak_rss_bytes", "max_abs_error",
               "rel_error", "preset_rel_error")
SMALL = ["prefill", "--synthetic", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "64",
         "--context", "200", "--chunk", "64", "--preset", "4bit_nc", "--threads", "2"]


def run(args, **kwargs):
    return subprocess.run([KVTILE, *args], capture_output=True, text=True, timeout=300, **kwargs)


def fail(args, result, why):
    sys.exit(f"kvtile {' '.join(args)}\n  {why}\n  exit {result.returncode}\n"
             f"  stdout: {result.stdout[-2000:]}\n  stderr: {result.stderr[-2000:]}")


def expect_ok(args, **kwargs):
    result = run(args, **kwargs)
    if result.returncode != 0 or result.stderr:
        fail(args, result, "wanted exit 0 and an empty stderr")
    if "\x1b" in result.stdout:
        fail(args, result, "colour although stdout is not a terminal")
    return result.stdout


def expect_error(args, *names, **kwargs):
    """Exit 2, one line on stderr that holds every one of `names`, and no report written."""
    with tempfile.TemporaryDirectory() as directory:
        report = os.path.join(directory, "report.json")
        full = args if "--json" in args else [*args, "--json", report]
        result = run(full, **kwargs)
        if result.returncode != 2:
            fail(full, result, "wanted exit 2")
        lines = result.stderr.splitlines()
        if len(lines) != 1 or not result.stderr.endswith("\n"):
            fail(full, result, "wanted exactly one line on stderr")
        for name in names:
            if name not in lines[0]:
                fail(full, result, f"wanted {name!r} named")
        if os.listdir(directory):
            fail(full, result, f"left {os.listdir(directory)} behind")


def replace(args, option, value):
    changed = list(args)
    changed[changed.index(option) + 1] = value
    return changed


def without(args, option):
    at = args.index(option)
    return args[:at] + args[at + 2:]


def bfloat16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def pack(values):
    return b"".join(struct.pack("<H", bfloat16(v)) for v in values)


def save(path, tensors, metadata=None):
    """tensors: {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def capture(tokens=40, num_heads=4, num_kv_heads=2, head_dim=32, prefix="", seed=1):
    rng = random.Random(seed)
    def rows(heads):
        return ("BF16", [tokens, heads, head_dim],
                pack(rng.gauss(0, 1) for _ in range(tokens * heads * head_dim)))
    return {prefix + "query": rows(num_heads), prefix + "key": rows(num_kv_heads),
            prefix + "value": rows(num_kv_heads)}


def load(path):
    with open(path) as file:
        return json.load(file)


def test_bad_input(scratch):
    expect_error(replace(SMALL, "--preset", "5bit"), "--preset", "5bit")
    expect_error(replace(SMALL, "--head-dim", "96"), "--head-dim", "96", "power of two")
    expect_error(replace(SMALL, "--head-dim", "1024"), "--head-dim", "1024")
    expect_error(replace(SMALL, "--num-heads", "5"), "--num-heads", "5", "2")
    for option in ("--context", "--chunk", "--num-heads", "--num-kv-heads", "--head-dim"):
        expect_error(replace(SMALL, option, "0"), option, "0")
        expect_error(replace(SMALL, option, "-3"), option, "-3")
        expect_error(replace(SMALL, option, "many"), option, "many")
    for option in ("--context", "--num-heads", "--num-kv-heads", "--head-dim", "--preset"):
        expect_error(without(SMALL, option), option)
    expect_error(replace(SMALL, "--context", str(10**12)), "--context")
    expect_error(replace(SMALL, "--threads", "-1"), "--threads")
    for extra, names in (
            (["--block-size", "0"], ["--block-size", "0"]),
            (["--tile", "-1"], ["--tile"]),
            (["--window", "-1"], ["--window"]),
            (["--softcap", "-1"], ["--softcap"]),
            (["--softcap", "nan"], ["--softcap"]),
            (["--softmax-scale", "0"], ["--softmax-scale"]),
            (["--check-rows", "-1"], ["--check-rows"]),
            (["--fp8", "e5m2"], ["--fp8", "e5m2"]),
            (["--layout", "planar"], ["--layout", "planar"]),
            (["--dtype", "int8"], ["--dtype", "int8"]),
            (["--backend", "tpu"], ["--backend", "tpu", "cpu"]),
            (["--layer", "0"], ["--layer"]),
            (["--input", "x.safetensors"], ["--input"]),
            (["--colour", "red"], ["--colour"])):
        expect_error(SMALL + extra, *names)
    expect_error(["prefill", "--preset", "4bit_nc"], "--input", "--synthetic")
    expect_error(["inspect", "--preset", "4bit_nc"], "--head-dim")
    expect_error(["inspect", "--preset", "k8v4", "--head-dim", "100"], "--head-dim", "100")
    expect_error(["inspect", "--preset", "4bit_nc", "--head-dim", "64", "--num-kv-heads", "0"],
                 "--num-kv-heads")
    expect_error(["verify"], "--vectors", "--scan")
    expect_error(["verify", "--vectors", "x", "--backend", "tpu"], "--backend", "tpu", "cpu")
    if run(["devices"]).returncode == 2:  # no GPU, or no CUDA in this build
        expect_error(["devices"], "cuda", "cpu")
        for backend in ("cuda", "cuda/rows", "cuda/tile", "cuda/hopper"):
            expect_error(SMALL + ["--backend", backend], "--backend", backend, "cpu")
            expect_error(["verify", "--vectors", "x", "--backend", backend], "--backend", backend)
    expect_error(["verify", "--vectors", "/no/such/file"], "/no/such/file")
    for args in ([], ["frobnicate"]):
        result = run(args)
        if result.returncode != 2 or len(result.stderr.splitlines()) != 1:
            fail(args, result, "wanted exit 2 and one line")


def test_safetensors(scratch):
    path = os.path.join(scratch, "capture.safetensors")
    args = ["prefill", "--input", path, "--preset", "4bit_nc"]
    good = capture()

    def expect(tensors, *names, metadata=None, extra=()):
        save(path, tensors, metadata)
        expect_error([*args, *extra], *names)

    save(path, good)
    whole = open(path, "rb").read()
    for size in (0, 5, 8, 40, len(whole) - 1000, len(whole) - 1):
        with open(path, "wb") as file:
            file.write(whole[:size])
        expect_error(args, path, "truncated" if size != 8 else "header")
    with open(path, "wb") as file:
        file.write(whole + b"x")
    expect_error(args, path)

    expect({k: v for k, v in good.items() if k != "value"}, "value")
    dtype, shape, raw = good["key"]
    expect({**good, "key": (dtype, [39, 2, 32], raw[:39 * 128])}, "key", "shape", "39")
    expect({**good, "value": (dtype, [40, 1, 64], raw)}, "value", "shape")
    expect({**good, "key": (dtype, [40, 64], raw)}, "key", "shape")
    expect({**good, "key": (dtype, [41, 2, 32], raw)}, "key", "41")
    expect({**good, "key": ("F16", shape, raw)}, "key", "dtype", "F16")
    expect({name: ("U8", s, r[::2]) for name, (_, s, r) in good.items()}, "query", "dtype", "U8")
    expect(capture(num_heads=3), "num_kv_heads", "3")
    expect(capture(head_dim=24), "--head-dim", "24")
    expect({k: v for k, v in capture(tokens=0).items()}, "query", "shape")
    for word, what in ((0x7FC0, "NaN"), (0xFF80, "infinity")):
        broken = bytearray(raw)
        struct.pack_into("<H", broken, 2 * (7 * 64 + 32 + 5), word)
        expect({**good, "key": (dtype, shape, bytes(broken))}, "key", what,
               "token 7 head 1 element 5")
    expect(good, "softmax_scale", metadata={"softmax_scale": "big"})
    expect(good, "--layer", "3", extra=["--layer", "3"])
    expect(good, "--context", "41", extra=["--context", "41"])
    expect(good, "--num-heads", extra=["--num-heads", "4"])

    save(path, {**capture(prefix="layers.3."), **capture(prefix="layers.11.", seed=2)},
         {"layers.3.window": "16", "softmax_scale": "0.25"})
    report_path = os.path.join(scratch, "report.json")
    expect_ok([*args, "--chunk", "7", "--json", report_path])
    report = load(report_path)
    names = [(l["name"], l["window"], l["softmax_scale"]) for l in report["layers"]]
    assert names == [("layer 3", 16, 0.25), ("layer 11", 0, 0.25)], names
    assert report["cache_bytes"] == sum(l["cache_bytes"] for l in report["layers"])
    assert report["query_tokens"] == 80
    expect_ok([*args, "--layer", "11", "--json", report_path])
    assert [l["name"] for l in load(report_path)["layers"]] == ["layer 11"]


def test_atomic(scratch):
    """A report appears whole or not at all, and a failed run leaves the old one alone."""
    report = os.path.join(scratch, "report.json")
    with open(report, "w") as file:
        file.write("old")
    inspect = ["inspect", "--preset", "4bit_nc", "--head-dim", "64", "--json"]

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    expect_error([*inspect, report], "--json", report, preexec_fn=small_files)
    expect_error([*replace(SMALL, "--context", "0"), "--json", report], "--context")
    assert os.listdir(scratch) == ["report.json"], os.listdir(scratch)
    assert open(report).read() == "old"
    expect_ok([*inspect, report])
    assert load(report)["slot_bytes"] == 70
    assert os.listdir(scratch) == ["report.json"], os.listdir(scratch)
    expect_error([*inspect, "/no/such/directory/report.json"], "--json", "/no/such/directory")
    expect_error([*inspect, scratch], "--json", scratch)
    if os.path.exists("/dev/full"):
        expect_error([*inspect, "/dev/full"], "--json", "/dev/full")
        with open("/dev/full", "w") as full:
            result = subprocess.run([KVTILE, *inspect[:-1]], stdout=full, stderr=subprocess.PIPE,
                                    text=True)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result
    expect_ok([*inspect, "/dev/null"])


def test_inspect(scratch):
    report_path = os.path.join(scratch, "report.json")
    for head_dim, sizes in SLOT_BYTES.items():
        for preset, slot_bytes in zip(PRESETS, sizes):
            for name in (preset, "turboquant_" + preset):
                text = expect_ok(["inspect", "--preset", name, "--head-dim", str(head_dim),
                                  "--block-size", "16", "--num-kv-heads", "4",
                                  "--json", report_path])
                report = load(report_path)
                assert f"{slot_bytes} bytes" in text, text
                assert report["slot_bytes"] == slot_bytes
                assert report["page_bytes"] == slot_bytes * 16 * 4
                assert report["bytes_per_token"] == slot_bytes * 4
                assert report["bytes_per_million_tokens"] == slot_bytes * 4 * 10**6
                assert report["dense_bytes_per_token"] == head_dim * 4 * 2 * 2
                fields = report["fields"]
                assert fields[0]["offset"] == 0
                for a, b in zip(fields, fields[1:]):
                    assert a["offset"] + a["bytes"] == b["offset"]
                assert fields[-1]["offset"] + fields[-1]["bytes"] == slot_bytes
                assert any("norm" in f["name"] for f in fields) == (preset != "k8v4")
    for head_dim, slot_bytes in ((80, 124), (96, 148), (192, 292)):
        expect_ok(["inspect", "--preset", "k8v4", "--head-dim", str(head_dim),
                   "--fp8", "e4b15", "--json", report_path])
        report = load(report_path)
        assert report["slot_bytes"] == slot_bytes and report["preset"] == "k8v4/e4b15"
    expect_ok(["inspect", "--preset", "4bit_nc", "--head-dim", "128", "--layout", "head_major",
               "--num-kv-heads", "2", "--json", report_path])
    report = load(report_path)
    assert (report["stride_token"], report["stride_head"]) == (134, 134 * 16)


def test_verify(scratch):
    """The scan finds exactly the planted words; golden files of another layout are refused."""
    pool = os.path.join(scratch, "pool.bin")
    report_path = os.path.join(scratch, "report.json")
    # 4bit_nc at head_dim 64: norm at 32, scale at 66, zero at 68 of 70 bytes.
    slot, heads, block_size, blocks = 70, 2, 16, 50
    data = bytearray(random.Random(3).randbytes(slot * heads * block_size * blocks))
    for at in range(0, len(data), slot):
        for field in (32, 66, 68):
            data[at + field + 1] &= 0x3F
    args = ["verify", "--scan", pool, "--preset", "4bit_nc", "--head-dim", "64", "--num-kv-heads",
            "2", "--json", report_path]
    with open(pool, "wb") as file:
        file.write(data)
    expect_ok(args)
    assert load(report_path)["non_finite"] == 0

    planted = [(3, 5, 1, 32, 0x7E00), (17, 0, 0, 66, 0xFC00), (49, 15, 1, 68, 0x7C01)]
    for block, token, head, field, word in planted:
        at = ((block * block_size + token) * heads + head) * slot + field
        data[at:at + 2] = struct.pack("<H", word)
    with open(pool, "wb") as file:
        file.write(data)
    result = run(args)
    if result.returncode != 1:
        fail(args, result, "wanted exit 1")
    report = load(report_path)
    found = [(w["block"], w["slot"], w["head"], w["word"]) for w in report["found"]]
    assert found == [(b, t, h, w) for b, t, h, _, w in planted], found
    assert len({w["field"] for w in report["found"]}) == 3
    assert report["non_finite"] == 3

    descriptor = os.path.join(scratch, "descriptor")
    with open(descriptor, "w") as file:
        file.write(report["descriptor"] + "\n")
    assert run([*args, "--descriptor", descriptor]).returncode == 1
    with open(descriptor, "w") as file:
        file.write(report["descriptor"].replace("head_dim=64", "head_dim=128") + "\n")
    os.remove(report_path)
    expect_error([*args, "--descriptor", descriptor], "head_dim=128", "head_dim=64")
    expect_error(replace(args, "--scan", "/no/such/pool"), "--scan", "/no/such/pool")
    expect_error(replace(args, "--head-dim", "128"), "--scan", "pages")
    for option in ("--preset", "--head-dim", "--num-kv-heads"):
        expect_error(without(args, option), option)

    golden = os.path.join(scratch, "golden.safetensors")
    save(golden, capture())
    expect_error(["verify", "--vectors", golden], "cases")
    save(golden, capture(), {"cases": json.dumps({"a": {"preset": "4bit_nc"}})})
    expect_error(["verify", "--vectors", golden], "fp8")


def check_report(report, head_dim, slot_bytes, tokens, num_kv_heads):
    for key in REPORT_KEYS:
        assert key in report, key
    assert report["backend"].startswith("cpu"), report["backend"]
    for key in REPORT_KEYS[1:]:
        assert isinstance(report[key], (int, float)) and math.isfinite(report[key]), (key, report)
    slots = -(-tokens // report["block_size"]) * report["block_size"] * num_kv_heads
    assert report["cache_bytes"] == slots * slot_bytes
    assert report["dense_cache_bytes"] == slots * head_dim * 4
    assert report["max_error_of_peak_value"] < 1e-5
    assert report["max_lse_error"] < 1e-5
    assert report["rel_error"] < 1e-5
    assert 1e-4 < report["preset_rel_error"] < 0.6, report["preset_rel_error"]
    assert 0 < report["softmax_distance_mean"] <= report["softmax_distance_max"] < 0.3
    assert 0.9 < report["key_cosine"] < 1


def test_prefill(scratch):
    report_path = os.path.join(scratch, "report.json")
    previous = 0
    for preset, slot_bytes in zip(PRESETS, SLOT_BYTES[64]):
        expect_ok([*replace(SMALL, "--preset", preset), "--json", report_path])
        report = load(report_path)
        check_report(report, 64, slot_bytes, 200, 2)
        # Fewer bits, more preset error; the kernel's own does not move.
        assert report["preset_rel_error"] > previous
        previous = report["preset_rel_error"]
        assert report["visible_pairs"] == 200 * 201 // 2

    def errors(*extra):
        expect_ok([*SMALL, *extra, "--json", report_path])
        report = load(report_path)
        assert report["max_error_of_peak_value"] < 1e-5
        return report

    base = errors()
    again = errors()
    for key in ("max_abs_error", "preset_rel_error", "softmax_distance_mean"):
        assert base[key] == again[key], key
    assert errors("--seed", "7")["preset_rel_error"] != base["preset_rel_error"]
    assert errors("--layout", "head_major", "--block-size", "7")["preset_rel_error"] == \
        base["preset_rel_error"]
    windowed = errors("--window", "33", "--softcap", "20")
    assert windowed["visible_pairs"] == sum(min(p + 1, 33) for p in range(200))
    last = errors("--last-chunk", "--tile", "64")
    assert last["query_tokens"] == 64 and last["fill_seconds"] > 0
    assert last["one_shot_bytes"] == (2 * 200 - 64) * 2 * 64 * 4
    assert errors("--check-rows", "3")["checked_rows"] == 3
    expect_ok([*SMALL, "--no-check", "--json", report_path])
    assert "max_abs_error" not in load(report_path)

    expect_ok([*replace(SMALL, "--preset", "k8v4"), "--fp8", "e4b15", "--json", report_path])
    assert load(report_path)["preset"] == "k8v4/e4b15"

    # bf16 in and out: the error is the output's rounding.
    expect_ok([*SMALL, "--dtype", "input", "--json", report_path])
    report = load(report_path)
    assert report["dtype"] == "bfloat16" and 1e-5 < report["rel_error"] < 2 ** -7

    # The workspace does not know the context, nor do the error bounds.
    sizes = set()
    for context in ("100", "1000", "3000"):
        expect_ok([*replace(SMALL, "--context", context), "--last-chunk", "--check-rows", "8",
                   "--json", report_path])
        sizes.add(load(report_path)["workspace_bytes"])
    assert len(sizes) == 1, sizes


def main():
    group = sys.argv[2]
    with tempfile.TemporaryDirectory() as scratch:
        globals()["test_" + group](scratch)
    print(f"cli/{group}: ok")


main()
