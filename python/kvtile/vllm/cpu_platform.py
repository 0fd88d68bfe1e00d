"""vLLM's CPU platform with one more answer: kvtile's backend for turboquant_* caches.

Everything else is the platform vLLM would have chosen itself, which is the base class.
"""

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvtile.vllm import host, register

_Base = resolve_obj_by_qualname(cpu_platform_plugin())


class KvtileCpuPlatform(_Base):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        cache_dtype = attn_selector_config.kv_cache_dtype
        if cache_dtype is None or not cache_dtype.startswith(host.DTYPE_PREFIX):
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        register()
        backend = AttentionBackendEnum.TURBOQUANT.get_class()
        reasons = backend.validate_configuration(device_capability=None,
                                                 **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"kvtile: {', '.join(reasons)} ({attn_selector_config})")
        return AttentionBackendEnum.TURBOQUANT.get_path()

    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        cache_config = vllm_config.cache_config
        packed = cache_config.cache_dtype.startswith(host.DTYPE_PREFIX)
        if not packed or not host.packs_all_layers():
            return
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

        boundary = set(TurboQuantConfig.get_boundary_skip_layers(vllm_config.model_config))
        cache_config.kv_cache_dtype_skip_layers = [
            layer for layer in cache_config.kv_cache_dtype_skip_layers if layer not in boundary]
