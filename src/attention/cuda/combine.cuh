// combine: merges the partial states of the rows kernel into out and lse, 64 dimensions of one row
// and head a block.
// Warps take states by index and are added in index order, so the bits depend on the plan alone.
// Every row of out is written: rows of no sequence, or that see nothing, are zeros with lse -inf.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/rows_state.cuh"

namespace kvtile::cuda {

inline constexpr int kCombineMaxWarps = 16;

__device__ inline void store_element(void* base, DType dtype, int64_t index, float x) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(base)[index] = x;
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(base)[index] = float_to_half_bits(x);
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(base)[index] = float_to_bfloat_bits(x);
      break;
  }
}

template <int kDim>
__global__ void __launch_bounds__(32 * kCombineMaxWarps, 1)
    rows_combine_kernel(const __grid_constant__ RowsParams p) {
  constexpr int kSlices = kDim / kRowsCombineDims;
  __shared__ float2 shared_out[kCombineMaxWarps][kRowsCombineDims / 2];
  __shared__ float shared_sum[kCombineMaxWarps], shared_high[kCombineMaxWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int slice = blockIdx.x % kSlices;
  const int head = static_cast<int>(blockIdx.x / kSlices % p.a.num_heads);
  const int64_t row = p.first_tile + blockIdx.x / kSlices / p.a.num_heads;

  // The tile that computed the row, and the row's place in it.
  const int seq = find_sequence(p, 1, 0, row, lane);
  const int64_t begin = clamped_row(p, seq), end = clamped_row(p, seq + 1);
  const int64_t query = row - begin;
  const int64_t tile = rows_tile_base(p.plan.queries_per_tile, p.plan.tiles_per_seq, begin, seq) +
                       query / p.plan.queries_per_tile;
  const bool in_sequence = query >= 0 && row < end;
  // A sequence longer than max_q_len promised has rows without a tile: NaN.
  const bool owned = in_sequence && tile < p.plan.num_tiles &&
                     (p.plan.tiles_per_seq == 0 ||
                      query < int64_t{p.plan.tiles_per_seq} * p.plan.queries_per_tile);
  const int in_group = head % p.a.group, kv_head = head / p.a.group;
  const int subtile = in_group / p.plan.heads_per_tile;
  const int heads = min(p.a.group - subtile * p.plan.heads_per_tile, p.plan.heads_per_tile);
  const int tile_row = static_cast<int>(query % p.plan.queries_per_tile) * heads + in_group -
                       subtile * p.plan.heads_per_tile;
  const int states = p.plan.num_states();
  const int64_t first_state =
      ((tile - p.first_tile) * p.plan.num_subtiles + subtile) * states * p.a.cache.num_kv_heads +
      kv_head;
#if __CUDA_ARCH__ >= 900
  // The launch after this one waits for its end before it reads or writes anything.
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
#endif

  // The warp's share, relative to its own maximum; a batch's loads are in flight together.
  constexpr int kBatch = 9;  // 144 states at once
  float high = -INFINITY, sum = 0.0f;
  float2 out = {0.0f, 0.0f};
  for (int first = warp; owned && first < states; first += kBatch * warps) {
    float2 sums[kBatch], x[kBatch];  // sums: offset and l
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int state = min(first + b * warps, states - 1);
      const RowsState partial =
          rows_state(p, first_state + int64_t{state} * p.a.cache.num_kv_heads, p.plan.rows, kDim);
      sums[b] = reinterpret_cast<const float2*>(partial.sums)[tile_row];
      x[b] = reinterpret_cast<const float2*>(partial.out + tile_row * kDim +
                                             slice * kRowsCombineDims)[lane];
    }
    float next = high;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * warps >= states) sums[b].x = -INFINITY;
      next = fmaxf(next, sums[b].x);
    }
    const float shrink = state_weight(high, next);
    sum *= shrink;
    out = {out.x * shrink, out.y * shrink};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      // An empty state adds nothing, and 2^(-inf - next) may be NaN.
      if (sums[b].x == -INFINITY) continue;
      const float weight = ptx::ex2(sums[b].x - next);
      sum = fmaf(sums[b].y, weight, sum);
      out = {fmaf(x[b].x, weight, out.x), fmaf(x[b].y, weight, out.y)};
    }
    high = next;
  }
  shared_out[warp][lane] = out;
  if (lane == 0) {
    shared_sum[warp] = sum;
    shared_high[warp] = high;
  }
  __syncthreads();
  if (warp != 0) return;

  // Lane w has warp w's maximum and sum.
  const float theirs = lane < warps ? shared_high[lane] : -INFINITY;
  high = warp_max(theirs);
  const bool seen = high != -INFINITY || (in_sequence && !owned);
  const float sink = p.a.sinks != nullptr && seen ? __ldg(p.a.sinks + head) * kLog2e : -INFINITY;
  high = fmaxf(high, sink);
  const float weight = state_weight(theirs, high);
  sum = warp_sum(lane < warps ? shared_sum[lane] * weight : 0.0f);
  if (in_sequence && !owned) sum = NAN;
  if (sink != -INFINITY) sum += ptx::ex2(sink - high);

  // A row that is NaN is NaN in every element and in lse.
  const float inverse = seen ? 1.0f / sum : 0.0f;
  float2 total = {0.0f, 0.0f};
#pragma unroll 4
  for (int w = 0; w < warps; ++w) {
    const float of_warp = __shfl_sync(~0u, weight, w);
    const float2 x = shared_out[w][lane];
    total = {fmaf(x.x, of_warp, total.x), fmaf(x.y, of_warp, total.y)};
  }
  const int64_t base =
      row * p.a.out_stride_token + head * p.a.out_stride_head + slice * kRowsCombineDims + 2 * lane;
  store_element(p.a.out, p.a.dtype, base, seen ? total.x * inverse : 0.0f);
  store_element(p.a.out, p.a.dtype, base + 1, seen ? total.y * inverse : 0.0f);
  if (p.a.lse != nullptr && slice == 0 && lane == 0) {
    constexpr float kLn2 = 0.6931471805599453f;
    p.a.lse[head * p.a.lse_stride_head + row * p.a.lse_stride_token] =
        seen ? (high + log2f(sum)) * kLn2 : -INFINITY;
  }
}

}  // namespace kvtile::cuda
