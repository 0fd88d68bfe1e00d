#!/usr/bin/env python3
# Captures post-RoPE query, key and value of chosen attention layers of a real model reading a real
# text, on the CPU. Inputs: a GGUF model that a Python package ships, a UTF-8 text; output: a file
# of capture_format.py. The model runs in float32 from dequantized weights; what its attention
# receives is recorded through transformers' attention interface and rounded once, to bfloat16.

import argparse
import hashlib
import importlib.metadata
import math
import os
import sys
import tempfile
import time

import capture_format
from gguf_model import MODELS, gguf_tokens, load_model

NAME = "kvtile_capture"


class Recorder:
    """Attention function that keeps what the chosen layers receive, then computes with sdpa."""

    def __init__(self, layers):
        self.rows = {layer: ([], [], []) for layer in layers}
        self.scales = {}
        self.windows = {}

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        import torch
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        layer = module.layer_idx
        if layer in self.rows:
            self.scales[layer] = float(kwargs["scaling"])
            self.windows[layer] = kwargs.get("sliding_window") or 0
            q_len = query.shape[2]
            # Key and value carry the cached past in front; the chunk's own rows are the last.
            for kept, rows in zip(self.rows[layer], (query, key, value)):
                kept.append(rows[0, :, -q_len:].transpose(0, 1).to(torch.bfloat16))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def load_recorded(path, recorder):
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, recorder)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return load_model(path, NAME)


def read_text(model, ids, chunk):
    """Runs the model over ids chunk by chunk; returns nats per token predicted in the last one."""
    import torch
    from transformers import DynamicCache

    ids = torch.tensor([ids])
    num_tokens = ids.shape[1]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for first in range(0, num_tokens, chunk):
            part = ids[:, first : first + chunk]
            last = first + part.shape[1] == num_tokens
            # Logits cost more than the layers at a vocabulary of 262,144: only the last chunk,
            # which sees all the cached past, is scored.
            output = model(part, past_key_values=cache, logits_to_keep=0 if last else 1)
            if sys.stderr.isatty():
                end = "\n" if last else ""
                done = first + part.shape[1]
                print(f"\r{done} / {num_tokens} tokens", end=end, file=sys.stderr, flush=True)
        return torch.nn.functional.cross_entropy(output.logits[0, :-1], part[0, 1:]).item()


def rope_theta(config, window):
    local = getattr(config, "rope_local_base_freq", None)
    return local if window and local else config.rope_theta


def number(value):
    """Shortest text of a number; integral values without a fraction."""
    return str(int(value)) if value == int(value) else repr(value)


def collect(recorder, layers, config):
    """({name: (shape, bytes)}, {name: str}) of recorded layers; prints what they hold."""
    import torch

    tensors, metadata = {}, {}
    for layer in layers:
        rows = recorder.rows[layer]
        prefix = capture_format.prefix(layer, len(layers))
        window = recorder.windows[layer]
        values = {
            "layer": layer,
            "softmax_scale": recorder.scales[layer],
            "window": window,
            "softcap": getattr(config, "attn_logit_softcapping", None) or 0,
            "rope_theta": rope_theta(config, window),
        }
        metadata.update({prefix + name: number(value) for name, value in values.items()})
        norms = []
        for name, parts in zip(capture_format.TENSORS, rows):
            tensor = torch.cat(parts).contiguous()
            data = tensor.view(torch.int16).numpy().tobytes()
            tensors[prefix + name] = (tuple(tensor.shape), data)
            norm = tensor.float().norm(dim=-1)
            norms.append(f"{name} {norm.min():.2f} / {norm.mean():.2f} / {norm.max():.2f}")
        print(f"layer {layer}, window {window}: norms min / mean / max: {', '.join(norms)}")
    return tensors, metadata


def parse_layers(text, num_layers):
    layers = range(num_layers) if text == "all" else sorted({int(i) for i in text.split(",")})
    if not layers or layers[0] < 0 or layers[-1] >= num_layers:
        raise ValueError
    return list(layers)


def positive(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parse_args():
    parser = argparse.ArgumentParser(
        description="Capture query, key and value of a real model's attention layers."
    )
    parser.add_argument(
        "--model", required=True, choices=MODELS, help="Python package of the model"
    )
    parser.add_argument("--text", required=True, help="UTF-8 text to read")
    parser.add_argument("--text-source", required=True, help="origin and license of the text")
    parser.add_argument("--tokens", type=positive, required=True, help="tokens to capture")
    parser.add_argument("--layers", default="all", help="comma-separated indices, or all")
    parser.add_argument("--chunk", type=positive, default=512, help="tokens a forward pass takes")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--out", required=True, help="safetensors file to write; {layer} in it: one file a layer"
    )
    return parser, parser.parse_args()


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def capture(parser, args, folder):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if args.threads:
        torch.set_num_threads(args.threads)
    model_name, model_license, locate = MODELS[args.model]
    path = locate(folder)
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    try:
        layers = parse_layers(args.layers, config.num_hidden_layers)
    except ValueError:
        parser.error(
            f"--layers: got {args.layers}, wanted indices below {config.num_hidden_layers} or all"
        )
    if args.tokens > config.max_position_embeddings:
        parser.error(
            f"--tokens: got {args.tokens}, the model takes {config.max_position_embeddings}"
        )
    with open(args.text, encoding="utf-8") as file:
        # Prose has three to five characters a token: this prefix is ample, and the token that its
        # end cuts is never captured.
        ids = gguf_tokens(path, file.read(args.tokens * 16 + 4096))[: args.tokens]
    if len(ids) < args.tokens:
        parser.error(f"--tokens: got {args.tokens}, the text has {len(ids)}")

    recorder = Recorder(layers)
    model = load_recorded(path, recorder)
    start = time.monotonic()
    nats = read_text(model, ids, args.chunk)
    seconds = time.monotonic() - start
    common = {
        "model": model_name,
        "model_package": f"{args.model} {importlib.metadata.version(args.model)}",
        "model_license": model_license,
        "model_sha256": sha256(path),
        "text_source": args.text_source,
        "text_sha256": sha256(args.text),
        "dtype": "bfloat16",
        "compute": "float32 from dequantized weights, "
        f"torch {importlib.metadata.version('torch')}, "
        f"transformers {importlib.metadata.version('transformers')}",
        "tokens": str(len(ids)),
        "chunk": str(args.chunk),
    }
    if hasattr(config, "query_pre_attn_scalar"):
        common["query_pre_attn_scalar"] = number(config.query_pre_attn_scalar)
    per_layer = "{layer}" in args.out
    for group in [[layer] for layer in layers] if per_layer else [layers]:
        path = args.out.replace("{layer}", str(group[0]))
        tensors, metadata = collect(recorder, group, config)
        capture_format.write(path, tensors, metadata | common)
        print(f"wrote {path}: {os.path.getsize(path)} bytes")
    print(
        f"{len(ids)} tokens in {seconds:.0f} s, perplexity of the last chunk {math.exp(nats):.2f}"
    )


def main():
    os.environ.setdefault("TQDM_DISABLE", "1")
    parser, args = parse_args()
    for name, path, found in (
        ("--text", args.text, os.path.isfile(args.text)),
        ("--out", args.out, os.path.isdir(os.path.dirname(args.out) or ".")),
    ):
        if not found:
            parser.error(f"{name}: {path}: no such file or folder")
    try:
        with tempfile.TemporaryDirectory() as folder:
            capture(parser, args, folder)
    except ImportError as error:
        parser.error(f"{error}; tools/README.md tells what to install")
    except (OSError, UnicodeDecodeError, capture_format.CaptureError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
