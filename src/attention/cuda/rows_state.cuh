// What the blocks of the rows kernel share with its combine: parameters, the tile a block works on,
// partial states, the rotated queries, and the raw chunk (plain fp32: at most a few dozen tokens).
// A partial state of a row is (offset, l, O): O and l are sums of 2^(x - offset) over the row's
// keys, x in log2 units; offset -inf is the empty state.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/rows_params.h"
#include "src/core/half2.h"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;

struct RowsState {
  float* out;
  float* sums;
};

__device__ inline RowsState rows_state(const RowsParams& p, int64_t state, int rows, int head_dim) {
  return {p.partial_out + state * rows * head_dim, p.partial_sums + state * rows * 2};
}

// The empty state of every row, by the whole block. Its sums are zeros because the combine loads
// them together with the offset that tells it not to use them.
template <int kDim>
__device__ inline void store_empty_state(const RowsState& partial, int num_rows) {
  for (int i = threadIdx.x; i < num_rows * kDim; i += blockDim.x) partial.out[i] = 0.0f;
  for (int row = threadIdx.x; row < num_rows; row += blockDim.x) {
    partial.sums[2 * row] = -INFINITY;
    partial.sums[2 * row + 1] = 0.0f;
  }
}

// Weight of a state in a union whose offset is `high`.
__device__ inline float state_weight(float offset, float high) {
  return offset == -INFINITY ? 0.0f : ptx::ex2(offset - high);
}

__device__ inline int64_t clamped_row(const RowsParams& p, int seq) {
  if (p.a.num_seqs == 0) return 0;  // and no arrays
  const int64_t row = __ldg(p.a.cu_seqlens_q + seq);
  return min(max(row, int64_t{0}), p.a.total_q);
}

// The last sequence whose first tile is at or before `tile`; the whole warp takes part.
__device__ inline int find_sequence(const RowsParams& p, int queries_per_tile, int tiles_per_seq,
                                    int64_t tile, int lane) {
  int begin = 0, count = p.a.num_seqs;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int probe = lane * step;
    const bool before =
        probe < count && rows_tile_base(queries_per_tile, tiles_per_seq,
                                        clamped_row(p, begin + probe), begin + probe) <= tile;
    const uint32_t votes = __ballot_sync(~0u, before);
    const int last = votes != 0 ? (31 - __clz(votes)) * step : 0;
    begin += last;
    count = min(step, count - last);
  }
  return begin;
}

struct RowsTile {
  int seq, num_queries, num_heads, head_offset;
  int64_t first_row;       // of query and out
  int64_t chunk_row;       // first row of the sequence
  int64_t first_position;  // of the first query
  int64_t seq_len, cached_len, table_position;

  __device__ int num_rows() const { return num_queries * num_heads; }
};

// `tile` counts from the launch's first.
__device__ inline RowsTile find_rows_tile(const RowsParams& p, int64_t tile, int subtile,
                                          int lane) {
  tile += p.first_tile;
  RowsTile t;
  const int per_tile = p.plan.queries_per_tile;
  t.seq = find_sequence(p, per_tile, p.plan.tiles_per_seq, tile, lane);
  const int64_t begin = clamped_row(p, t.seq), end = clamped_row(p, t.seq + 1);
  t.seq_len = __ldg(p.a.seq_lens + t.seq);
  t.table_position = p.a.first_position(t.seq);
  const int64_t q_len = max(end - begin, int64_t{0});
  const int64_t first =
      (tile - rows_tile_base(per_tile, p.plan.tiles_per_seq, begin, t.seq)) * per_tile;
  t.num_queries =
      first < 0 ? 0 : static_cast<int>(min(int64_t{per_tile}, max(q_len - first, int64_t{0})));
  t.head_offset = subtile * p.plan.heads_per_tile;
  t.num_heads = min(p.a.group - t.head_offset, p.plan.heads_per_tile);
  t.chunk_row = begin;
  t.first_row = begin + first;
  t.first_position = t.seq_len - q_len + first;
  t.cached_len = max(t.seq_len - q_len, int64_t{0});
  return t;
}

// Keys a row sees: [begin, end) of positions.
__device__ inline void row_range(const RowsParams& p, const RowsTile& tile, int query,
                                 int64_t* begin, int64_t* end) {
  const int64_t position = tile.first_position + query;
  *begin = p.a.window > 0 ? max(position - p.a.window + 1, int64_t{0}) : 0;
  *end = position < 0 ? 0 : p.a.causal ? position + 1 : tile.seq_len;
}

// Element lane + 32 i of a row. One branch for all, so that the loads are in flight together.
template <int kDim>
__device__ inline void load_row(const void* base, DType dtype, int64_t offset, int lane,
                                float (&x)[kDim / 32]) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      x[i] = __ldg(static_cast<const float*>(base) + offset + lane + 32 * i);
    }
    return;
  }
  uint16_t words[kDim / 32];
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    words[i] = __ldg(static_cast<const uint16_t*>(base) + offset + lane + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    x[i] =
        dtype == DType::kBFloat16 ? bfloat_bits_to_float(words[i]) : half_bits_to_float(words[i]);
  }
}

// `query` is the row's query in the tile.
__device__ inline int64_t query_offset(const RowsParams& p, const RowsTile& tile, int kv_head,
                                       int query, int row) {
  const int64_t head =
      int64_t{kv_head} * p.a.group + tile.head_offset + row - query * tile.num_heads;
  return (tile.first_row + query) * p.a.query_stride_token + head * p.a.query_stride_head;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// softcap * tanh(x / softcap) for x = dot * cap_factor / (2 log2 e), as a share of softcap.
__device__ inline float capped(float dot, float cap_factor) {
  return 1.0f - 2.0f * ptx::rcp(ptx::ex2(dot * cap_factor) + 1.0f);
}

// Rows of the raw chunk: one row a warp at a time, eight keys in flight.
template <int kDim>
__device__ void raw_chunk_state(const RowsParams& p, const RowsTile& tile, int kv_head,
                                const RowsState& partial, int warp, int warps, int lane) {
  constexpr int kKeys = 512 / kDim;
  const int64_t key_base = kv_head * p.a.chunk_key_stride_head;
  const int64_t value_base = kv_head * p.a.chunk_value_stride_head;
  for (int row = warp; row < tile.num_rows(); row += warps) {
    float query[kDim / 32], out[kDim / 32] = {};
    load_row<kDim>(p.a.query, p.a.dtype, query_offset(p, tile, kv_head, row / tile.num_heads, row),
                   lane, query);
    int64_t begin, end;
    row_range(p, tile, row / tile.num_heads, &begin, &end);
    begin = max(begin, tile.cached_len);
    float offset = -INFINITY, l = 0.0f;
    // Position of the first row of the chunk; below zero when seq_len < q_len.
    const int64_t origin = tile.first_position - (tile.first_row - tile.chunk_row);
    end = min(end, tile.seq_len);
    for (int64_t position = begin; position < end; position += kKeys) {
      float key[kKeys][kDim / 32], value[kKeys][kDim / 32], x[kKeys];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const int64_t chunk = tile.chunk_row + min(position + k, end - 1) - origin;
        load_row<kDim>(p.a.chunk_key, p.a.dtype, chunk * p.a.chunk_key_stride_token + key_base,
                       lane, key[k]);
        load_row<kDim>(p.a.chunk_value, p.a.dtype,
                       chunk * p.a.chunk_value_stride_token + value_base, lane, value[k]);
      }
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) dot = fmaf(query[i], key[k][i], dot);
        x[k] = warp_sum(dot) * p.a.softmax_scale;
        if (p.a.softcap > 0.0f) {
          x[k] = p.a.softcap * capped(x[k], 2.0f * kLog2e / p.a.softcap);
        }
        x[k] *= kLog2e;
      }
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        if (position + k >= end) break;
        const float high = fmaxf(offset, x[k]);
        const float base = high == -INFINITY ? 0.0f : high;
        const float shrink = ptx::ex2(offset - base), e = ptx::ex2(x[k] - base);
        offset = high;
        l = fmaf(l, shrink, e);
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) out[i] = fmaf(out[i], shrink, e * value[k][i]);
      }
    }
    // A NaN score leaves no maximum: the state is not empty.
    if (offset == -INFINITY && !(l == 0.0f)) offset = 0.0f;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) partial.out[row * kDim + lane + 32 * i] = out[i];
    if (lane == 0) {
      partial.sums[2 * row] = offset;
      partial.sums[2 * row + 1] = l;
    }
  }
}

}  // namespace kvtile::cuda
