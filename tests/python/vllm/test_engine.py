"""Whole engines on the CPU: SmolLM2 served by vLLM from a packed cache, beside kvtile.hf.

Stock vLLM cannot do this: it accepts the option on the CPU and its 16-bit kernels then read packed
pages (release 0.32.0 ends in a segmentation fault at the first long prompt).
"""

import copy
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
import smollm2
import torch

HERE = pathlib.Path(__file__).parent
PRESET = "turboquant_4bit_nc"
KV_BYTES = 256 << 20
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
ENGINE = {"kv_cache_dtype": PRESET, "block_size": smollm2.BLOCK_SIZE, "max_model_len": 8192,
          "max_num_batched_tokens": smollm2.CHUNK, "max_num_seqs": 8,
          "kv_cache_memory_bytes": KV_BYTES, "enable_prefix_caching": True}


@pytest.fixture(scope="session")
def model():
    return smollm2.make_folder(smollm2.REPOSITORY / "build/models/smollm2")


def run_engine(model, waves, engine=ENGINE, **environment):
    """(answer, log) of one engine; the process itself may fail (answer None)."""
    done = subprocess.run(
        [sys.executable, HERE / "engine_run.py"], text=True, capture_output=True, timeout=1500,
        input=json.dumps({"model": str(model), "engine": engine, "waves": waves,
                          "new_tokens": smollm2.NEW_TOKENS}),
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment})
    log = done.stdout + done.stderr
    return (json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None), log


def greedy_by_hf(model, prefix, tails):
    """Tokens after the prefix and after the prefix with each tail, by kvtile.hf."""
    from transformers import AutoModelForCausalLM

    import kvtile.hf

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32,
                                               attn_implementation="kvtile").eval()
    cache = kvtile.hf.PackedCache(net.config, PRESET, block_size=smollm2.BLOCK_SIZE)

    def step(ids, cache):
        return net(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1]

    def greedy(logits, cache):
        tokens = []
        while True:
            tokens.append(int(logits.argmax()))
            if len(tokens) == smollm2.NEW_TOKENS:
                return tokens
            logits = step([tokens[-1]], cache)

    with torch.inference_mode():
        for begin in range(0, len(prefix), smollm2.CHUNK):
            logits = step(prefix[begin:begin + smollm2.CHUNK], cache)
        answers = [greedy(logits, copy.deepcopy(cache))]
        for tail in tails:
            own = copy.deepcopy(cache)
            answers.append(greedy(step(tail, own), own))
    return answers


def test_long_prompt_prefix_hits_and_batches_equal_hf(model):
    prefix, tails = smollm2.prompts(model)
    answer, log = run_engine(model, [[prefix], [prefix + tail for tail in tails]],
                             KVTILE_VLLM="1", KVTILE_VLLM_ALL_LAYERS="1",
                             KVTILE_VLLM_SELF_CHECK="50")
    assert answer, log
    (first,), second = answer["waves"]
    assert "is active: turboquant_4bit_nc, 9 heads over 3 of 64" in log and "path cpu" in log
    assert "kvtile self-check" in log and "'failed': 0" in log.rpartition("kvtile self-check")[2]
    # Each of the second wave reads the whole prefix from the cache of the first.
    assert first["hit"] == 0 and [one["hit"] for one in second] == [len(prefix)] * len(tails)
    wanted = greedy_by_hf(model, prefix, tails)
    assert [first["tokens"], *(one["tokens"] for one in second)] == wanted
    # Packed slots of 70 bytes against 16-bit ones of 256.
    sixteen_bit = KV_BYTES // (LAYERS * KV_HEADS * HEAD_DIM * 2 * 2)
    assert answer["capacity"] / sixteen_bit == pytest.approx(256 / 70, rel=0.01)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def curl(port, path, body=None, timeout=120):
    command = ["curl", "-sS", "--fail", "--max-time", str(timeout),
               f"http://127.0.0.1:{port}{path}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def test_openai_server_answers_with_the_defaults(model, tmp_path):
    """vllm serve in its own processes, 16-bit boundary layers beside packed ones."""
    port = free_port()
    log = tmp_path / "server.log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
             "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager",
             "--kv-cache-dtype", PRESET, "--max-model-len", "2048", "--kv-cache-memory-bytes",
             str(KV_BYTES), "--max-num-seqs", "4", "--served-model-name", "smollm2"],
            stdout=sink, stderr=sink, env={**os.environ, "KVTILE_VLLM": "1"})
    try:
        deadline = time.monotonic() + 900
        while curl(port, "/health", timeout=5) is None:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(2)
        text = " ".join(str(n) for n in range(1, 120))
        answer = curl(port, "/v1/completions", {
            "model": "smollm2", "prompt": text, "max_tokens": 8, "temperature": 0})
        assert answer, log.read_text()
        assert json.loads(answer)["choices"][0]["text"].startswith(" 120 121"), answer
        assert "is active: turboquant_4bit_nc" in log.read_text()
    finally:
        server.terminate()
        server.wait(60)


def test_a_model_feature_outside_stops_the_start_with_its_name(model, tmp_path):
    folder = tmp_path / "head_dim_80"
    folder.mkdir()
    for file in pathlib.Path(model).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 80}))
    answer, log = run_engine(folder, [], {**ENGINE, "load_format": "dummy"}, KVTILE_VLLM="1")
    assert answer is None and "head_dim: got 80" in log, log
