#!/usr/bin/env python3
"""vLLM on a GPU: its stock TurboQuant backend beside kvtile's plugin, whole engines.

Inputs: an environment with CUDA vLLM, kvtile and its CUDA library; a folder to write models and
logs to. Models have Qwen3's architecture and the attention shapes of docs/performance.md, a few
layers and seeded random weights. Each engine is a process, forked after the imports. `MEASUREMENTS`
says what runs; a failed engine is a row with its error. Writes JSON as bench/tables.py reads it.
"""

import argparse
import gc
import json
import os
import pathlib
import random
import statistics
import sys
import time
import traceback

SHAPES = {"A": (24, 4, 256), "B": (32, 8, 128)}
PRESET = "turboquant_4bit_nc"
HIDDEN, VOCAB, CHUNK = 1024, 1024, 8192
LONG, MIDDLE = 262144, 131072
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
NOT_RUN = "not run"
BACKENDS = ("stock", "kvtile")
TOLERANCE = 2**-7  # of the largest value, for bfloat16: both sides round


def make_model(path, shape, layers, habit=0.0, positions=1 << 20):
    """Seeded weights with scores of deviation 2.25: neither uniform nor one-hot attention.

    habit: how strongly a token asks for its successor in a cycle of eight, so that text repeats and
    drafts are accepted, while attention decides where a cycle is left.
    """
    import torch
    from safetensors.torch import save_file

    heads, kv_heads, head_dim = SHAPES[shape]
    if (path / "config.json").exists():
        return
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(17)

    def normal(rows, columns):
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return weight.to(torch.bfloat16)

    embedding, token = normal(VOCAB, HIDDEN) * HIDDEN**0.5, torch.arange(VOCAB)
    before = token // 8 * 8 + (token + 7) % 8
    head = normal(VOCAB, HIDDEN) + (habit / HIDDEN * embedding[before].float()).bfloat16()
    one = torch.ones(HIDDEN, dtype=torch.bfloat16)
    sharp = torch.full((head_dim,), 1.5, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head,
               "model.norm.weight": one}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": one, name + "post_attention_layernorm.weight": one,
            name + "self_attn.q_norm.weight": sharp, name + "self_attn.k_norm.weight": sharp,
            name + "self_attn.q_proj.weight": normal(heads * head_dim, HIDDEN),
            name + "self_attn.k_proj.weight": normal(kv_heads * head_dim, HIDDEN),
            name + "self_attn.v_proj.weight": normal(kv_heads * head_dim, HIDDEN),
            name + "self_attn.o_proj.weight": normal(HIDDEN, heads * head_dim),
            name + "mlp.gate_proj.weight": normal(2 * HIDDEN, HIDDEN),
            name + "mlp.up_proj.weight": normal(2 * HIDDEN, HIDDEN),
            name + "mlp.down_proj.weight": normal(HIDDEN, 2 * HIDDEN)}
    save_file({name: w.clone() for name, w in weights.items()}, path / "model.safetensors",
              {"format": "pt"})
    (path / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": VOCAB,
        "max_position_embeddings": positions, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1}))


def prompt(length, seed):
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def start(case, **engine):
    """An engine in this process, every layer packed."""
    import vllm
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    # vLLM keeps the first and last two layers 16-bit: with so few layers none would be left.
    TurboQuantConfig.get_boundary_skip_layers = staticmethod(lambda *_: [])
    options = dict(
        model=str(case["model"]), kv_cache_dtype=PRESET, dtype="bfloat16", seed=0,
        skip_tokenizer_init=True, max_num_batched_tokens=CHUNK, max_num_seqs=4,
        enable_prefix_caching=False, async_scheduling=False, gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=case.get("kv_cache_bytes", 4 << 30), disable_log_stats=True,
        compilation_config={**GRAPHS, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]})
    return vllm.LLM(**{**options, **engine}).llm_engine


def serve(engine, prompts, new_tokens, on_step=lambda seconds: None):
    """Greedy tokens of each prompt; all are in the engine at once."""
    import torch
    from vllm import SamplingParams

    names = [str(engine.add_request(str(i), {"prompt_token_ids": ids}, SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)))
        for i, ids in enumerate(prompts)]
    tokens = {}
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = engine.step()
        torch.cuda.synchronize()
        on_step(time.perf_counter() - begin)
        tokens |= {o.request_id: list(o.outputs[0].token_ids) for o in outputs}
    found = [next(t for name, t in tokens.items() if name.split("-")[0] == str(i) or name == n)
             for i, n in enumerate(names)]
    return found


def layers(case):
    """Each attention call of kvtile's engine once more by the stock class, on the same cache."""
    import torch
    from kvtile.vllm import backend, self_check
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionImpl
    from vllm.v1.worker.workspace import current_workspace_manager

    ours, seen, largest = backend.KvtileImpl.forward, {}, {}

    def forward(self, layer, query, key, value, kv_cache, metadata, output=None, *others, **named):
        result = ours(self, layer, query, key, value, kv_cache, metadata, output, *others, **named)
        if metadata is None:
            return result
        rows = metadata.num_actual_tokens
        current_workspace_manager().unlock()
        stock = torch.empty_like(result)
        TurboQuantAttentionImpl.forward(self, layer, query, key, value, kv_cache, metadata, stock)
        number = layer.layer_name
        largest[number] = max(largest.get(number, 1e-3), value[:rows].abs().max().item())
        error = (result[:rows].float() - stock[:rows].float()).abs().max().item()
        rows_of = torch.diff(metadata.query_start_loc_cpu)
        kind = ("decode" if metadata.max_query_len == 1 else
                "first chunk" if metadata.max_query_len == metadata.max_seq_len else
                "continuation" if int(rows_of.max()) > 128 else "short continuation")
        calls, worst = seen.get((number, kind), (0, 0.0))
        # NaN compares as smaller than anything: it must not pass.
        seen[number, kind] = calls + 1, (max(worst, error / largest[number]) if error == error
                                         else float("inf"))
        return result

    backend.KvtileImpl.forward = forward
    engine = start(case, enforce_eager=True, max_model_len=32768)
    seen.clear()  # warm-up reads pages nothing wrote
    # One long prompt, its 40-token tail, two that share steps with it, then decode.
    serve(engine, [prompt(3 * CHUNK + 40, 1)], 4)
    serve(engine, [prompt(CHUNK + 900, 2), prompt(700, 3), prompt(200, 4)], 8)
    return {"kinds": [{"layer": layer, "kind": kind, "calls": calls, "error": worst}
                      for (layer, kind), (calls, worst) in sorted(seen.items())],
            "self_check": self_check.counts}


def chunks(case):
    """Milliseconds of every chunk of a long prompt, and of decode steps at MIDDLE tokens."""
    steps = []
    engine = start(case, max_model_len=LONG)
    serve(engine, [prompt(2 * CHUNK, 1)], 2)
    answer = {}
    serve(engine, [prompt(MIDDLE, 5)], 66, steps.append)
    answer["decode_ms"] = [s * 1e3 for s in steps[-64:]]
    if case.get("long"):
        steps.clear()
        serve(engine, [prompt(LONG - 8, 6)], 1, steps.append)
        answer["chunk_ms"] = [s * 1e3 for s in steps]
    return answer


def capped(case):
    """A prompt of LONG tokens in a process that may allocate case["cap"] bytes."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(case["cap"] / total)
    answer, steps = {"chunks": 0}, []
    try:
        engine = start(case, max_model_len=LONG)
        answer["started"] = True
        answer["tokens"] = serve(engine, [prompt(LONG - 8, 6)], 4, steps.append)[0]
    except torch.OutOfMemoryError as error:
        answer["error"] = str(error).split(" If reserved")[0]
    answer.update(chunks=len(steps), peak=torch.cuda.max_memory_allocated())
    return answer


def spec(case):
    """Greedy tokens of several requests at once, with or without n-gram drafts."""
    more = {"max_model_len": 8192}
    if case["drafts"]:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": case["drafts"],
                                      "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if case.get("eager"):
        more["enforce_eager"] = True
    engine, steps = start(case, **more), []
    tokens = serve(engine, [prompt(n, n) for n in (150, 1100, 2500, 3900)], 128, steps.append)
    return {"tokens": tokens, "steps": len(steps)}


WORK = {"layers": layers, "chunks": chunks, "capped": capped, "spec": spec}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the runner that has n-gram drafts
INVARIANT = {**V1, "VLLM_BATCH_INVARIANT": "1"}
# Groups run one after another, the engines of a group beside each other (timings alone).
MEASUREMENTS = [
    [dict(name="layers A", work="layers", shape="A", layers=3, kvtile=True, limit=70),
     dict(name="layers B", work="layers", shape="B", layers=3, kvtile=True,
          env={**V1, "KVTILE_VLLM_SELF_CHECK": "7"}, limit=70),
     *(dict(name=f"spec {who} {form} {what}", work="spec", shape="B", layers=3, limit=70,
            habit=7.0, kvtile=who == "kvtile", env=env, drafts=drafts)
       for who, form, env in (("kvtile", "invariant", INVARIANT), ("kvtile", "ordinary", V1),
                              ("stock", "ordinary", V1))
       for what, drafts in (("plain", 0), ("drafts", 3))),
     *(dict(name=f"capped A {who}", work="capped", shape="A", layers=4, limit=70,
            kvtile=who == "kvtile", cap=7 << 29, kv_cache_bytes=11 << 27)
       for who in BACKENDS)],
    *([dict(name=f"chunks {shape} {who}", work="chunks", shape=shape, layers=4, long=True,
            kvtile=who == "kvtile", limit=70)]
      for shape in "AB" for who in BACKENDS),
]


def machine():
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30)}


def child(case, folder):
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
                       "VLLM_USE_FLASHINFER_SAMPLER": "0",
                       "KVTILE_VLLM": "1" if case["kvtile"] else "0", **case.get("env", {})})
    log = os.open(folder / f"{case['name']}.log".replace(" ", "_"),
                  os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    begin = time.monotonic()
    answer = {}
    try:
        answer["machine"] = machine()
        answer |= WORK[case["work"]](case)
    except BaseException as error:
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["seconds"] = round(time.monotonic() - begin, 1)
    (folder / f"{case['name']}.json").write_text(json.dumps(answer))
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def in_child(function):
    """Runs it in a fork: a process whose PyTorch has used its threads or the GPU cannot fork."""
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("a process of the benchmark failed")


def run_group(cases, folder):
    """Yields (name, answer) as they come; a child past its limit is ended."""
    children = {}
    for case in cases:
        pid = os.fork()
        if pid == 0:
            child(case, folder)
        children[pid] = case
    deadline = {pid: time.monotonic() + case["limit"] for pid, case in children.items()}
    while children:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            for late in [p for p in children if time.monotonic() > deadline[p]]:
                os.kill(late, 9)
                deadline[late] = float("inf")
            time.sleep(0.1)
            continue
        case = children.pop(pid)
        file = folder / f"{case['name']}.json"
        yield case["name"], (json.loads(file.read_text()) if file.exists() else
                             {"error": "ended by its limit or a signal"})


def cells(table, **columns):
    return {"table": table, "cells": {name.replace("_", " "): text
                                      for name, text in columns.items()}}


def shape_text(shape):
    return "{}/{} heads of {}".format(*SHAPES[shape])


def compared(table, shape, context, stock, ours):
    """A row of times in milliseconds, None where an engine has none; decode also as tokens/s."""
    times = {"stock": stock, "kvtile": ours}
    columns = {f"{who} ms": NOT_RUN if ms is None else f"{ms:,.2f}" for who, ms in times.items()}
    if table == "decode":
        columns |= {f"{who} tokens/s": "" if ms is None else f"{1e3 / ms:.0f}"
                    for who, ms in times.items()}
    ratio = "" if None in times.values() else f"{stock / ours:.2f}"
    return cells(table, model=shape_text(shape), context=context, **columns,
                 stock_over_kvtile=ratio)


def rows(answers):
    """The tables of docs/vllm.md; of an engine that failed, its error."""
    found = []
    for shape in SHAPES:
        answer = answers.get(f"layers {shape}", {"error": NOT_RUN})
        if "error" in answer:
            found.append(cells("layers", model=shape_text(shape), step=answer["error"][:160],
                               calls="", largest_difference="", wanted=""))
        kinds = {}
        for one in answer.get("kinds", ()):
            calls, worst = kinds.get(one["kind"], (0, 0.0))
            kinds[one["kind"]] = calls + one["calls"], max(worst, one["error"])
        for kind, (calls, worst) in kinds.items():
            found.append(cells("layers", model=shape_text(shape), step=kind, calls=str(calls),
                               largest_difference=f"{worst:.1e}", wanted=f"{TOLERANCE:.1e}"))
        if answer.get("self_check", {}).get("checked"):
            checked = answer["self_check"]
            found.append(cells("layers", model=shape_text(shape), step="self-check in float64",
                               calls=str(checked["checked"]),
                               largest_difference=f"{checked['failed']} failed", wanted="0"))
    for who in BACKENDS:
        answer = answers.get(f"capped A {who}", {"error": NOT_RUN})
        found.append(cells(
            "capped", backend=who, outcome=answer.get("error", "served")[:160],
            tokens_read=f"{min(answer.get('chunks', 0) * CHUNK, LONG - 8):,}",
            peak_GiB=f"{answer['peak'] / 2**30:.2f}" if "peak" in answer else ""))
    for shape in SHAPES:
        both = [answers.get(f"chunks {shape} {who}", {}) for who in BACKENDS]
        for context in (CHUNK, 32768, 65536, MIDDLE, 196608, LONG):
            found.append(compared(
                "chunks", shape, f"{context:,}",
                *(one["chunk_ms"][context // CHUNK - 1] if "chunk_ms" in one else None
                  for one in both)))
        found.append(compared("chunks", shape, "whole prompt", *(
            sum(one["chunk_ms"]) if "chunk_ms" in one else None for one in both)))
        found.append(compared("decode", shape, f"{MIDDLE:,}", *(
            statistics.median(one["decode_ms"]) if "decode_ms" in one else None for one in both)))
    for who, form in (("kvtile", "invariant"), ("kvtile", "ordinary"), ("stock", "ordinary")):
        both = [answers.get(f"spec {who} {form} {what}", {}) for what in ("plain", "drafts")]
        one = dict(backend=who, model_beside_it=form)
        if not all("tokens" in answer for answer in both):
            text = next((answer["error"] for answer in both if "error" in answer), NOT_RUN)
            found.append(cells("spec", **one, greedy_tokens=text[:160], equal="",
                               steps_without_drafts="", steps_with_drafts=""))
            continue
        pairs = [pair for tokens in zip(*(answer["tokens"] for answer in both))
                 for pair in zip(*tokens)]
        found.append(cells("spec", **one, greedy_tokens=str(len(pairs)),
                           equal=str(sum(a == b for a, b in pairs)),
                           steps_without_drafts=str(both[0]["steps"]),
                           steps_with_drafts=str(both[1]["steps"])))
    return found


def record(answers, commit):
    import torch
    import triton
    import vllm

    import kvtile

    return {"commit": commit, "uncommitted_changes": False,
            "machine": next((a["machine"] for a in answers.values() if "machine" in a), {}),
            "command": "bench/vllm_gpu.py FOLDER --commit ID",
            "versions": {"kvtile": kvtile.version(), "vllm": vllm.__version__,
                         "torch": torch.__version__, "triton": triton.__version__},
            "rows": rows(answers), "answers": answers}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="for models, logs and raw answers")
    parser.add_argument("--commit", default="not stated", help="recorded with the results")
    parser.add_argument("--only", help="measurements whose names begin so, comma-separated")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    groups = [[c for c in group if c["name"].startswith(wanted)] for group in MEASUREMENTS]
    for case in (c for group in groups for c in group):
        case["model"] = options.folder / (f"{case['shape']}{case['layers']}" +
                                          ("h" if "habit" in case else ""))
    in_child(lambda: [make_model(case["model"], case["shape"], case["layers"],
                                 case.get("habit", 0.0))
                      for group in groups for case in group])
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the children initialise CUDA
    import numba  # noqa: F401  (n-gram drafts)
    import vllm.entrypoints.llm  # noqa: F401
    import vllm.v1.worker.gpu.model_runner  # noqa: F401
    import vllm.v1.worker.gpu_model_runner  # noqa: F401
    import vllm.v1.worker.gpu_worker  # noqa: F401
    gc.freeze()
    answers = {}
    for group in groups:
        for name, answer in run_group(group, options.folder):
            print(name, json.dumps(answer)[:600], flush=True)
            answers[name] = answer
            # After each: what was measured stays when the machine does not.
            (options.folder / "vllm_h200.json").write_text(
                json.dumps(record(answers, options.commit), indent=1) + "\n")


if __name__ == "__main__":
    main()
