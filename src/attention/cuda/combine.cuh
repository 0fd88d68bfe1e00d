// combine: merges the partial states of the rows kernel into out and lse, one row and head a block.
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
  constexpr int kElements = kDim / 32;
  __shared__ float shared_out[kCombineMaxWarps][kDim];
  __shared__ float shared_sum[kCombineMaxWarps], shared_high[kCombineMaxWarps];
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
  // The launch after this one waits for its end before it reads or writes anything.
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
#endif

  // The warp's share, relative to its own maximum; a batch's loads are in flight together.
  constexpr int kBatch = 9;  // 144 states at once
  float high = -INFINITY, sum = 0.0f, out[kElements] = {};
  for (int first = warp; owned && first < states; first += kBatch * warps) {
    float offset[kBatch], l[kBatch], x[kBatch][kElements];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int state = first + b * warps;
      const RowsState partial =
          rows_state(p, state_index(min(state, states - 1)), p.plan.rows, kDim);
      offset[b] = state < states ? partial.sums[2 * tile_row] : -INFINITY;
      l[b] = partial.sums[2 * tile_row + 1];
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        x[b][i] = partial.out[tile_row * kDim + lane + 32 * i];
      }
    }
    float next = high;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) next = fmaxf(next, offset[b]);
    const float shrink = state_weight(high, next);
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < kElements; ++i) out[i] *= shrink;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      // An empty state adds nothing, and 2^(-inf - next) may be NaN.
      if (offset[b] == -INFINITY) continue;
      const float weight = ptx::ex2(offset[b] - next);
      sum = fmaf(l[b], weight, sum);
#pragma unroll
      for (int i = 0; i < kElements; ++i) out[i] = fmaf(x[b][i], weight, out[i]);
    }
    high = next;
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) shared_out[warp][lane + 32 * i] = out[i];
  if (lane == 0) {
    shared_sum[warp] = sum;
    shared_high[warp] = high;
  }
  __syncthreads();

  high = -INFINITY;
  for (int w = 0; w < warps; ++w) high = fmaxf(high, shared_high[w]);
  const bool seen = high != -INFINITY || (in_sequence && !owned);
  const float sink = p.a.sinks != nullptr && seen ? __ldg(p.a.sinks + head) * kLog2e : -INFINITY;
  high = fmaxf(high, sink);
  sum = in_sequence && !owned ? NAN : 0.0f;
  for (int w = 0; w < warps; ++w)
    sum = fmaf(shared_sum[w], state_weight(shared_high[w], high), sum);
  if (sink != -INFINITY) sum += ptx::ex2(sink - high);

  // A row that is NaN is NaN in every element and in lse.
  const float inverse = seen ? 1.0f / sum : 0.0f;
  const int64_t base = row * p.a.out_stride_token + head * p.a.out_stride_head;
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) {
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) {
      total = fmaf(shared_out[w][d], state_weight(shared_high[w], high), total);
    }
    store_element(p.a.out, p.a.dtype, base + d, seen ? total * inverse : 0.0f);
  }
  if (p.a.lse != nullptr && threadIdx.x == 0) {
    constexpr float kLn2 = 0.6931471805599453f;
    p.a.lse[head * p.a.lse_stride_head + row * p.a.lse_stride_token] =
        seen ? (high + log2f(sum)) * kLn2 : -INFINITY;
  }
}

}  // namespace kvtile::cuda
