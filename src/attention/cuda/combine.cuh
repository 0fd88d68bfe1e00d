// combine: merges the partial states of the rows kernel into out and lse, one row and head a block.
// Warps take states by index and are added in index order, so the bits depend on the plan alone.
// Every row of out is written: rows of no sequence, or that see nothing, are zeros with lse -inf.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "src/attention/cuda/rows_state.cuh"

namespace kvtile::cuda {

inline constexpr int kCombineMaxWarps = 8;

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
__global__ void __launch_bounds__(32 * kCombineMaxWarps)
    rows_combine_kernel(const __grid_constant__ RowsParams p) {
  constexpr int kElements = kDim / 32;
  __shared__ float shared_out[kCombineMaxWarps][kDim];
  __shared__ float shared_sum[kCombineMaxWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int head = static_cast<int>(blockIdx.x % p.a.num_heads);
  const int64_t row = blockIdx.x / p.a.num_heads;

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
  const auto state_index = [&](int state) {
    return ((tile * p.plan.num_subtiles + subtile) * states + state) * p.a.cache.num_kv_heads +
           kv_head;
  };
#if __CUDA_ARCH__ >= 900
  ptx::grid_dependency_wait();
#endif

  float high = -INFINITY;
  if (owned) {
    for (int state = lane; state < states; state += 32) {
      high = fmaxf(high, rows_state(p, state_index(state), p.plan.rows, kDim).sums[2 * tile_row]);
    }
  }
  high = warp_max(high);
  const bool seen = high != -INFINITY || (in_sequence && !owned);
  const float sink = p.a.sinks != nullptr && seen ? __ldg(p.a.sinks + head) * kLog2e : -INFINITY;
  high = fmaxf(high, sink);

  float sum = in_sequence && !owned ? NAN : 0.0f, out[kElements] = {};
  if (owned && seen) {
#pragma unroll 4
    for (int state = warp; state < states; state += warps) {
      const RowsState partial = rows_state(p, state_index(state), p.plan.rows, kDim);
      const float offset = partial.sums[2 * tile_row];
      float x[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] = partial.out[tile_row * kDim + lane + 32 * i];
      const float l = partial.sums[2 * tile_row + 1];
      if (offset == -INFINITY) continue;
      const float weight = ptx::ex2(offset - high);
      sum = fmaf(l, weight, sum);
#pragma unroll
      for (int i = 0; i < kElements; ++i) out[i] = fmaf(x[i], weight, out[i]);
    }
  }
  if (warps > 1) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) shared_out[warp][lane + 32 * i] = out[i];
    if (lane == 0) shared_sum[warp] = sum;
    __syncthreads();
    if (warp != 0) return;
    for (int w = 1; w < warps; ++w) {
      sum += shared_sum[w];
#pragma unroll
      for (int i = 0; i < kElements; ++i) out[i] += shared_out[w][lane + 32 * i];
    }
  }
  if (sink != -INFINITY) sum += ptx::ex2(sink - high);

  // A row that is NaN is NaN in every element and in lse.
  const float inverse = seen ? 1.0f / sum : 0.0f;
  const int64_t base = row * p.a.out_stride_token + head * p.a.out_stride_head;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    store_element(p.a.out, p.a.dtype, base + lane + 32 * i, seen ? out[i] * inverse : 0.0f);
  }
  if (p.a.lse != nullptr && lane == 0) {
    constexpr float kLn2 = 0.6931471805599453f;
    p.a.lse[head * p.a.lse_stride_head + row * p.a.lse_stride_token] =
        seen ? (high + log2f(sum)) * kLn2 : -INFINITY;
  }
}

}  // namespace kvtile::cuda
