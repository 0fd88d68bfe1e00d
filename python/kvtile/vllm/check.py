"""`kvtile vllm-check`: what the plugin would do in this environment, without starting an engine."""

import argparse
import sys

import kvtile
from kvtile.vllm import host

# Shapes the workspace is stated for when none are given: a 27B hybrid model and an 8B dense one.
SHAPES = ((24, 4, 256), (32, 8, 128))


def main(argv=None) -> int:
    """Exit status 0 when kvtile would be active, 1 when not."""
    parser = argparse.ArgumentParser(prog="kvtile vllm-check", description=__doc__)
    parser.add_argument("--shape", type=_shape, action="append", metavar="HEADS/KV_HEADS/HEAD_DIM",
                        help="of the attention layers on one GPU, e.g. 32/8/128; may be repeated")
    parser.add_argument("--rows", type=int, default=8192,
                        help="the engine's --max-num-batched-tokens (default 8192)")
    parser.add_argument("--seqs", type=int, default=256,
                        help="the engine's --max-num-seqs (default 256)")
    args = parser.parse_args(argv)
    print(f"kvtile {kvtile.version()}, backends {', '.join(kvtile.backends())}")
    print(f"vLLM {host.version() or 'not installed'}; tested with {host.TESTED_TEXT}")
    if host.mode() is host.Mode.TILED and host.untested() is None:
        print(f"KVTILE_VLLM=tiled: vLLM's own backend, {host.tile_tokens()} cached tokens unpacked "
              "at a time where a request has more and flash attention is there")
        return 0
    why = host.refusal()
    if why is not None:
        print(f"not active: {why}")
        return 1
    import torch

    from kvtile.vllm import CPU_PLATFORM, active, register

    register()
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    chosen = f"{type(current_platform).__module__}.{type(current_platform).__name__}"
    if on_cpu and chosen != CPU_PLATFORM:
        print(f"not active: the CPU platform is {chosen}, whose TurboQuant is not kvtile's "
              "(another platform plugin, VLLM_PLUGINS or VLLM_TARGET_DEVICE=cpu comes before it)")
        return 1
    if not active():
        print("not active: another plugin holds TURBOQUANT in vLLM's registry")
        return 1
    path = "cpu" if on_cpu else "cuda"
    if path not in kvtile.backends():
        print(f"not active: this libkvtile has no {path} attention")
        return 1
    from kvtile.vllm.backend import KvtileBackend

    device = torch.device(path)
    print(f"active: backend {KvtileBackend.__module__}.{KvtileBackend.__qualname__}, "
          f"{'head' if host.head_major(KvtileBackend) else 'token'}-major caches, path {path}")
    for num_heads, num_kv_heads, head_dim in args.shape or SHAPES:
        for preset in kvtile.presets():
            try:
                need = max(kvtile.workspace_bytes(
                    kvtile.SlotFormat(preset, head_dim, host.fp8_flavour(device)),
                    total_q=args.rows, num_seqs=args.seqs, num_heads=num_heads,
                    num_kv_heads=num_kv_heads, block_size=16, chunk=chunk, backend=path)
                    for chunk in (False, True))
                text = f"workspace {need / 2**20:.1f} MiB whatever the context"
            except kvtile.KvtileError as error:
                text = f"refused: {error}"
            print(f"  {host.DTYPE_PREFIX}{preset}, {num_heads} heads over {num_kv_heads} of "
                  f"{head_dim}: {text}")
    return 0


def _shape(text):
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"got {text}, wanted HEADS/KV_HEADS/HEAD_DIM")
    return tuple(map(int, parts))


if __name__ == "__main__":
    sys.exit(main())
