"""torch.ops.kvtile.attend, encode, decode and merge_states: kvtile's calls as PyTorch operators.

    import kvtile.torch
    torch.ops.kvtile.attend(query, out, pages, block_table, seq_lens, cu_seqlens_q, "4bit_nc")

Operators take the pages tensor and the preset instead of a PagedCache, because only tensors and
numbers cross torch's dispatcher. All write into tensors the caller made (`out`, `lse`, `pages`) and
return nothing, so that a CUDA graph replays them over the same memory; with a `workspace` an attend
allocates nothing. Fake implementations let torch.compile(fullgraph=True) trace through.
Shapes, dtypes and errors are those of the functions of the same name in `kvtile`.
"""

import functools

import torch

import kvtile

# torch.library.custom_op would read these from annotations, but in torch 2.6 it fails on an omitted
# optional tensor that is written.
_SCHEMAS = {
    "attend": "Tensor query, Tensor(a!) out, Tensor pages, Tensor block_table, Tensor seq_lens, "
              "Tensor cu_seqlens_q, str preset, *, str layout='token_major', str fp8='e4m3', "
              "float? softmax_scale=None, bool causal=True, int window=0, float softcap=0.0, "
              "Tensor? sinks=None, Tensor? chunk_key=None, Tensor? chunk_value=None, "
              "Tensor? first_positions=None, Tensor(b!)? lse=None, Tensor(c!)? workspace=None, "
              "int tile_tokens=0, int max_q_len=0, int max_seq_len=0, "
              "bool batch_invariant=False, int num_threads=0",
    "encode": "Tensor key, Tensor value, Tensor(a!) pages, Tensor slot_mapping, str preset, *, "
              "str layout='token_major', str fp8='e4m3', int num_threads=0",
    "decode": "Tensor pages, Tensor slot_mapping, Tensor(a!) key, Tensor(b!) value, str preset, "
              "*, str layout='token_major', str fp8='e4m3', bool unrotate_keys=True, "
              "int num_threads=0",
    "merge_states": "Tensor[] outs, Tensor[] lses, Tensor(a!) out, Tensor(b!) lse, *, "
                    "int num_threads=0",
}
_library = torch.library.Library("kvtile", "DEF")


@functools.lru_cache(maxsize=64)
def _format(preset, head_dim, fp8):
    return kvtile.SlotFormat(preset, head_dim, fp8)


def _cache(pages, preset, head_dim, layout, fp8):
    return kvtile.PagedCache(pages, _format(preset, head_dim, fp8), layout)


def _attend(query, out, pages, block_table, seq_lens, cu_seqlens_q, preset, *,
            layout="token_major", fp8="e4m3", **options):
    kvtile.attend(query, _cache(pages, preset, query.shape[-1], layout, fp8), block_table,
                  seq_lens, cu_seqlens_q, out=out, **options)


def _encode(key, value, pages, slot_mapping, preset, *, layout="token_major", fp8="e4m3",
            **options):
    kvtile.encode(key, value, _cache(pages, preset, key.shape[-1], layout, fp8), slot_mapping,
                  **options)


def _decode(pages, slot_mapping, key, value, preset, *, layout="token_major", fp8="e4m3",
            **options):
    kvtile.decode(_cache(pages, preset, key.shape[-1], layout, fp8), slot_mapping, key=key,
                  value=value, **options)


def _merge_states(outs, lses, out, lse, **options):
    kvtile.merge_states(list(zip(outs, lses)), out=out, lse=lse, **options)


def _register():
    implementations = {"attend": _attend, "encode": _encode, "decode": _decode,
                       "merge_states": _merge_states}
    for name, schema in _SCHEMAS.items():
        _library.define(f"{name}({schema}) -> ()")
        _library.impl(name, implementations[name], "CompositeExplicitAutograd")
        # Everything is written in place: there is no result to describe.
        torch.library.register_fake(f"kvtile::{name}", lambda *args, **kwargs: None, lib=_library)


_register()
