"""kvtile in vLLM: its TurboQuant attention, on the packed cache itself.

`register` and `platform` are the entry points that vLLM calls in each of its processes; see
docs/vllm.md. `install_tiled_continuation_prefill` is the smaller step: vLLM's own backend with
its continuation prefill and workspace bounded by a tile.
"""

import logging

from kvtile.vllm import host
from kvtile.vllm.tiled_prefill import install_tiled_continuation_prefill, uninstall

__all__ = ["active", "install_tiled_continuation_prefill", "platform", "register", "uninstall"]

BACKEND = "kvtile.vllm.backend.KvtileBackend"
CPU_PLATFORM = "kvtile.vllm.cpu_platform.KvtileCpuPlatform"
# A child of vLLM's logger: it has the handlers, in every process.
logger = logging.getLogger("vllm.kvtile")


def register() -> bool:
    """Puts kvtile's backend in the place of vLLM's TURBOQUANT; returns whether it is active.

    Called by vLLM in every process, any number of times. Outside the tested versions nothing is
    touched and one line says so; with KVTILE_VLLM=1 or tiled that is RuntimeError instead.
    """
    mode = host.mode()
    if mode is host.Mode.OFF:
        return False
    why = host.untested()
    if why is not None:
        if mode is not host.Mode.AUTO:
            raise RuntimeError(f"kvtile: KVTILE_VLLM={mode.value}, but {why}")
        logger.warning("kvtile is not active: %s", why)
        return False
    if mode is host.Mode.TILED:
        if install_tiled_continuation_prefill(host.tile_tokens()):
            logger.info("kvtile tiles vLLM's own continuation prefill: %d cached tokens at a time",
                        host.tile_tokens())
        return False
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.TURBOQUANT, BACKEND)
    return True


def active() -> bool:
    """Whether vLLM's registry of this process answers TURBOQUANT with kvtile's backend."""
    if host.refusal() is not None:
        return False
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.TURBOQUANT.get_path() == BACKEND


def platform() -> str | None:
    """vLLM's question whether a platform of ours applies: on the CPU, where stock vLLM has no
    TurboQuant, a CPU platform that answers for these cache dtypes; nowhere else."""
    if host.refusal() is not None:
        return None
    from vllm.platforms import cpu_platform_plugin

    return CPU_PLATFORM if cpu_platform_plugin() else None
