"""vLLM's TurboQuant backend with kvtile's attention.

The cache spec, the cache dtypes and, on a GPU, the store are the host's own; what is replaced is
reading: one `kvtile.attend` per layer and run of requests covers decode, verify and prefill.
Whether a request's own chunk is read raw or from the packed cache depends on its number of rows
alone (`host.RAW_CHUNK_ROWS`), never on its batch-mates. Scratch is what `kvtile.workspace_bytes`
states for the largest batch the engine may send; cached lengths do not enter. Under vLLM's batch
invariance, requests of few rows are attended over batch-invariantly and each other one by itself.
"""

import dataclasses
import logging

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (AttentionCGSupport, AttentionMetadataBuilder, AttentionType,
                                       MultipleOf)
from vllm.v1.attention.backends import turboquant_attn
from vllm.v1.attention.backends.turboquant_attn import (TurboQuantAttentionBackend,
                                                        TurboQuantAttentionImpl,
                                                        TurboQuantMetadata)
from vllm.v1.worker.workspace import (current_workspace_manager, is_workspace_manager_initialized)

import kvtile
from kvtile.vllm import context_parallel, host, self_check
from kvtile.vllm.probe import probe_store

logger = logging.getLogger("vllm.kvtile")


class KvtileBackend(TurboQuantAttentionBackend):
    cache_dtype = ""  # of this process's layers
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_impl_cls():
        return KvtileImpl

    @staticmethod
    def get_builder_cls():
        return KvtileMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size,
                           cache_dtype_str="auto"):
        shape_of = getattr(super(), "get_kv_cache_shape", None)
        if shape_of is None:
            raise NotImplementedError("this vLLM lays its caches out without asking")
        # Release 0.26.0: the older of its model runners, which n-gram drafts need, says "auto".
        return shape_of(num_blocks, block_size, num_kv_heads, head_size,
                        cls.cache_dtype if cache_dtype_str == "auto" else cache_dtype_str)

    @classmethod
    def supported_kv_cache_layouts(cls):
        # Reading takes any strides; the host's store on a GPU wants its own order.
        return None if current_platform.is_cpu() else super().supported_kv_cache_layouts()

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_batch_invariance(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_head_size(cls, head_size):
        # What the library refuses depends on the preset too: KvtileImpl asks it.
        return head_size > 0

    @classmethod
    def supports_compute_capability(cls, capability):
        return current_platform.is_cpu() or current_platform.is_cuda()


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive requests of a batch whose own chunk is read the same way."""

    rows: slice
    requests: slice
    raw: bool
    invariant: bool  # asks for bits that do not depend on the other rows
    max_q_len: int  # bound of a request's rows
    cu_seqlens_q: torch.Tensor  # [requests + 1] int32, from 0


@dataclasses.dataclass
class KvtileMetadata(TurboQuantMetadata):
    runs: tuple[Run, ...] = ()
    workspace_bytes: int = 0
    share: context_parallel.Share | None = None  # under decode context parallelism


def split_runs(query_start_loc, starts, max_q_len, invariant=False) -> tuple[Run, ...]:
    """The runs of a batch. starts: query_start_loc as a list of ints."""
    num_requests = len(starts) - 1
    if num_requests == 0:
        return ()
    num_rows = [end - begin for begin, end in zip(starts, starts[1:])]
    raw = [rows >= host.RAW_CHUNK_ROWS for rows in num_rows]
    alone = [invariant and rows > host.SHARED_ROWS for rows in num_rows]
    edges = [0, *(i for i in range(1, num_requests)
                  if raw[i] != raw[i - 1] or alone[i] or alone[i - 1]), num_requests]

    def run(begin, end, offsets):
        bound = (num_rows[begin] if alone[begin] else
                 min(max_q_len, host.SHARED_ROWS) if invariant else max_q_len)
        return Run(slice(starts[begin], starts[end]), slice(begin, end), raw[begin],
                   invariant and not alone[begin], bound, offsets)

    if len(edges) == 2:
        # The tensor as it is: in a captured graph its address must be the host's own.
        return (run(0, num_requests, query_start_loc),)
    return tuple(run(begin, end, query_start_loc[begin:end + 1] - query_start_loc[begin])
                 for begin, end in zip(edges, edges[1:]))


class KvtileMetadataBuilder(AttentionMetadataBuilder[KvtileMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if host.packs_all_layers() and device.type != "cpu":
            raise NotImplementedError(f"KVTILE_VLLM_ALL_LAYERS: got 1 on {device}, wanted the CPU")
        # Requests that are read packed come first, so that a mixed batch is two runs.
        self._init_reorder_batch_threshold(host.RAW_CHUNK_ROWS - 1, supports_spec_as_decode=False)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        self.dcp = (impls[0].dcp_world_size, impls[0].dcp_rank)
        self.workspace_bytes = max(
            impl.workspace_bytes(vllm_config, kv_cache_spec.block_size, device) for impl in impls)
        scratch(device, self.workspace_bytes)
        probe_store(layers[layer_names[0]], kv_cache_spec.block_size,
                    vllm_config.model_config.dtype, device)
        self._say_what_runs(impls[0])

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        # A rank's share is laid out on the host.
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def _say_what_runs(self, impl):
        text = (f"kvtile {kvtile.version()} is active: {impl.kv_cache_dtype}, "
                f"{impl.num_heads} heads over {impl.num_kv_heads} of {impl.head_size}, "
                f"{'head' if host.head_major(KvtileBackend) else 'token'}-major pages of "
                f"{self.kv_cache_spec.block_size}, path {impl.path(self.device)}, workspace "
                f"{self.workspace_bytes / 2**20:.1f} MiB whatever the context")
        if text not in _said:
            _said.add(text)
            logger.info("%s", text)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        batch = common_attn_metadata
        if batch.causal is not True:
            raise NotImplementedError("kvtile: non-causal attention over a turboquant cache")
        starts = batch.query_start_loc_cpu.tolist()
        share = None
        if self.dcp[0] > 1:
            share = context_parallel.share_of(
                batch, starts, *self.dcp,
                self.vllm_config.parallel_config.cp_kv_cache_interleave_size)
        return KvtileMetadata(
            seq_lens=batch.seq_lens, slot_mapping=batch.slot_mapping,
            block_table=batch.block_table_tensor, query_start_loc=batch.query_start_loc,
            num_actual_tokens=batch.num_actual_tokens, max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len, is_prefill=batch.max_query_len > 1,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            runs=split_runs(batch.query_start_loc, starts, batch.max_query_len,
                            host.batch_invariant()),
            workspace_bytes=self.workspace_bytes, share=share)


class KvtileImpl(TurboQuantAttentionImpl):
    supports_dcp = True
    can_return_lse_for_decode = True  # what the host asks of a backend under DCP

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
                 sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
                 attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None,
                 **others):
        refused = [name for name, given in (
            ("ALiBi", alibi_slopes), ("KV sharing between layers", kv_sharing_target_layer_name),
            ("prefill context parallelism", self.pcp_world_size > 1),
            ("a sliding window under context parallelism",
             self.dcp_world_size > 1 and sliding_window),
            ("attention sinks under context parallelism",
             self.dcp_world_size > 1 and sinks is not None),
            ("batch invariance under context parallelism",
             self.dcp_world_size > 1 and host.batch_invariant()), *others.items()) if given]
        if attn_type != AttentionType.DECODER:
            refused.append(f"{AttentionType(attn_type).value} attention")
        if refused:
            raise NotImplementedError(
                f"kvtile: {', '.join(refused)} with --kv-cache-dtype {kv_cache_dtype}; leave these "
                "layers out with --kv-cache-dtype-skip-layers, or set KVTILE_VLLM=0")
        super().__init__(num_heads, head_size, scale, num_kv_heads, None, sliding_window,
                         kv_cache_dtype, logits_soft_cap, attn_type, None, sinks=sinks)
        if getattr(self, "_soa_store", False):
            raise NotImplementedError("kvtile: planar pages (the FlyDSL store)")
        self.window = sliding_window or 0
        self.softcap = logits_soft_cap or 0.0
        self._sinks = sinks
        self._cache = None
        self._config = turboquant_attn.get_current_vllm_config()
        # The format exists, or the library says what it lacks, before anything is loaded.
        kvtile.SlotFormat(kv_cache_dtype, head_size)
        KvtileBackend.cache_dtype = kv_cache_dtype

    def process_weights_after_loading(self, act_dtype):
        super().process_weights_after_loading(act_dtype)
        if self._sinks is not None:
            self._sinks = self._sinks.to(torch.float32).contiguous()

    def format_on(self, device):
        return kvtile.SlotFormat(self.kv_cache_dtype, self.head_size, host.fp8_flavour(device))

    def path(self, device):
        return "cpu" if device.type == "cpu" else "cuda"

    def workspace_bytes(self, vllm_config, block_size, device):
        """Scratch of the largest batch the engine may send this layer."""
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        verify_rows = 1 + (speculative.num_speculative_tokens or 0) if speculative else 1
        num_rows = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * verify_rows)
        # Under context parallelism: all ranks' heads over the cache, and up to a sequence a row.
        num_seqs = num_rows if self.dcp_world_size > 1 else scheduler.max_num_seqs
        calls = [dict(num_heads=self.num_heads * self.dcp_world_size, chunk=False),
                 dict(num_heads=self.num_heads, chunk=True)]
        if host.batch_invariant():
            calls.append(dict(num_heads=self.num_heads, chunk=False, batch_invariant=True,
                              max_q_len=host.SHARED_ROWS))
        return max(kvtile.workspace_bytes(
            self.format_on(device), total_q=num_rows, num_seqs=num_seqs,
            num_kv_heads=self.num_kv_heads, block_size=block_size,
            dtype=vllm_config.model_config.dtype, window=self.window, softcap=self.softcap,
            sinks=self._sinks is not None, backend=self.path(device),
            num_threads=_num_threads(device), **call) for call in calls)

    def paged(self, kv_cache):
        """The host's cache tensor of this layer as kvtile reads it."""
        if self._cache is None or self._cache.pages is not kv_cache:
            layout = "head_major" if host.head_major(KvtileBackend) else "token_major"
            cache = kvtile.PagedCache(kv_cache, self.format_on(kv_cache.device), layout)
            if cache.num_kv_heads != self.num_kv_heads:
                raise kvtile.InvalidArgument(
                    f"kv_cache: got {list(kv_cache.shape)}, wanted {self.num_kv_heads} heads in "
                    f"{layout} order")
            self._cache = cache
        return self._cache

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if kv_cache.device.type != "cpu":
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        num_tokens = slot_mapping.shape[0]
        kvtile.encode(key[:num_tokens], value[:num_tokens], self.paged(kv_cache), slot_mapping,
                      num_threads=_num_threads(kv_cache.device))

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None,
                output_scale=None, output_block_scale=None):
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvtile: attention with a quantised output")
        if output is None:
            output = torch.empty_like(query)
        if attn_metadata is None:
            # The host measures what a step needs: scratch belongs to it, before the cache is sized.
            scratch(query.device, self.workspace_bytes(
                self._config, self._config.cache_config.block_size, query.device))
            return output.zero_()
        shape = (-1, self.num_heads, self.head_size)
        runs = attn_metadata.runs
        num_rows = runs[-1].rows.stop if runs else 0
        rows, out = query.view(shape), output.view(shape)
        out[num_rows:].zero_()
        cache = self.paged(kv_cache)
        workspace = scratch(query.device, attn_metadata.workspace_bytes)
        if attn_metadata.share is not None:
            context_parallel.attend(self, rows[:num_rows], key[:num_rows], value[:num_rows], cache,
                                    attn_metadata, out[:num_rows], workspace,
                                    _num_threads(query.device))
            return output
        for run in runs:
            call = dict(
                query=rows[run.rows], cache=cache,
                block_table=attn_metadata.block_table[run.requests],
                seq_lens=attn_metadata.seq_lens[run.requests], cu_seqlens_q=run.cu_seqlens_q,
                softmax_scale=self.scale, window=self.window, softcap=self.softcap,
                sinks=self._sinks, chunk_key=key[run.rows] if run.raw else None,
                chunk_value=value[run.rows] if run.raw else None)
            kvtile.attend(**call, out=out[run.rows], workspace=workspace,
                          max_q_len=run.max_q_len, max_seq_len=attn_metadata.max_seq_len,
                          batch_invariant=run.invariant,
                          num_threads=_num_threads(query.device))
            self_check.sample(call, out[run.rows])
        return output


_said: set[str] = set()
_own_scratch: dict[torch.device, torch.Tensor] = {}


def scratch(device, num_bytes):
    """The bytes every layer of this process shares: the host's workspace, or one buffer of our own
    where the host has none (the CPU). The first call of a size reserves it."""
    if device.type != "cpu" and is_workspace_manager_initialized():
        return current_workspace_manager().get_simultaneous(((num_bytes,), torch.uint8))[0]
    held = _own_scratch.get(device)
    if held is None or held.numel() < num_bytes:
        held = _own_scratch[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return held


def _num_threads(device):
    # The host's own count: OpenMP's default would be taken from the variables of the process.
    return torch.get_num_threads() if device.type == "cpu" else 0
