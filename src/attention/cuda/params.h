// What the kernels read of an AttentionCall: plain data passed by value, with every default
// resolved (the cache: core/cache_params.h). Strides and offsets are 64-bit. Lengths and tables are
// device pointers: they decide visibility, and nothing here is derived from their contents.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvtile/attention.h"
#include "src/core/cache_params.h"
#include "src/core/hd.h"

namespace kvtile::cuda {

struct AttentionParams {
  const void* query = nullptr;        // [total_q, num_heads, head_dim] of dtype
  void* out = nullptr;                // the same shape
  float* lse = nullptr;               // [num_heads, total_q] or null
  const void* chunk_key = nullptr;    // [total_q, num_kv_heads, head_dim] or null
  const void* chunk_value = nullptr;  // both or neither
  const float* sinks = nullptr;       // [num_heads] or null
  const int32_t* block_table = nullptr;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* seq_lens = nullptr;
  const int32_t* first_positions = nullptr;

  int64_t query_stride_token = 0, query_stride_head = 0;  // elements, all resolved
  int64_t out_stride_token = 0, out_stride_head = 0;
  int64_t chunk_key_stride_token = 0, chunk_key_stride_head = 0;
  int64_t chunk_value_stride_token = 0, chunk_value_stride_head = 0;
  int64_t lse_stride_head = 0, lse_stride_token = 0;
  int64_t block_table_stride = 0;
  int64_t max_blocks = 0;
  int64_t total_q = 0;
  int64_t window = 0;  // 0 = unlimited

  CacheParams cache;
  float softmax_scale = 0.0f;
  float softcap = 0.0f;
  int num_seqs = 0;
  int num_heads = 0;
  int group = 1;  // query heads of one KV head
  DType dtype = DType::kBFloat16;
  bool causal = true;

  KVTILE_HD const int32_t* table_row(int seq) const {
    return block_table + static_cast<int64_t>(seq) * block_table_stride;
  }
  KVTILE_HD int64_t first_position(int seq) const {
    return first_positions != nullptr ? first_positions[seq] : 0;
  }
};

inline AttentionParams make_attention_params(const AttentionCall& call) {
  const int64_t head_dim = call.cache.format.head_dim;
  const auto or_dense = [](int64_t stride, int64_t dense) { return stride != 0 ? stride : dense; };
  AttentionParams params;
  params.query = call.query;
  params.out = call.out;
  params.lse = call.lse;
  params.chunk_key = call.chunk_key;
  params.chunk_value = call.chunk_value;
  params.sinks = call.sinks;
  params.block_table = call.block_table;
  params.cu_seqlens_q = call.cu_seqlens_q;
  params.seq_lens = call.seq_lens;
  params.first_positions = call.first_positions;
  const int64_t query_row = call.num_heads * head_dim;
  const int64_t chunk_row = call.cache.num_kv_heads * head_dim;
  params.query_stride_token = or_dense(call.query_stride_token, query_row);
  params.query_stride_head = or_dense(call.query_stride_head, head_dim);
  params.out_stride_token = or_dense(call.out_stride_token, query_row);
  params.out_stride_head = or_dense(call.out_stride_head, head_dim);
  params.chunk_key_stride_token = or_dense(call.chunk_key_stride_token, chunk_row);
  params.chunk_key_stride_head = or_dense(call.chunk_key_stride_head, head_dim);
  params.chunk_value_stride_token = or_dense(call.chunk_value_stride_token, chunk_row);
  params.chunk_value_stride_head = or_dense(call.chunk_value_stride_head, head_dim);
  params.lse_stride_head = or_dense(call.lse_stride_head, call.total_q);
  params.lse_stride_token = or_dense(call.lse_stride_token, 1);
  params.block_table_stride = or_dense(call.block_table_stride, call.max_blocks);
  params.max_blocks = call.max_blocks;
  params.total_q = call.total_q;
  params.window = call.mask.window;
  params.cache = make_cache_params(call.cache);
  params.softmax_scale = call.softmax_scale;
  params.softcap = call.softcap;
  params.num_seqs = call.num_seqs;
  params.num_heads = call.num_heads;
  params.group = call.num_heads / call.cache.num_kv_heads;
  params.dtype = call.dtype;
  params.causal = call.mask.causal;
  return params;
}

}  // namespace kvtile::cuda
