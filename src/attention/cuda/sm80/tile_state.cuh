// The state of a tile engine's piece: spans of accumulators, in mma C fragments (wgmma's are the
// same, a warp's 16 rows after another's), join what earlier spans carried.
#pragma once

#include <cuda_runtime.h>

#include "src/attention/cuda/sm80/tile_plan.h"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// A row's reference moves when its maximum grew by more than this (log2).
inline constexpr float kLazyGrowth = 3.0f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// Adds this span's accumulators to the carried state of the piece and clears them. The carried
// state is read only when `carried`, that is after the piece's first span; a row whose carried
// reference is -inf has no payload. While no reference has `moved` since it was written, the sums
// are made in the memory and nobody waits for them: the same bits. Not on sm_120, where `moved`
// would spill.
template <int kHeadDim, int kRowTiles>
__device__ __forceinline__ void flush_span(float (&o)[kRowTiles][kHeadDim / 8][4],
                                           float (&l)[kRowTiles][2], const float (&m)[kRowTiles][2],
                                           float4* carry, float2* softmax, bool carried,
                                           bool moved) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if __CUDA_ARCH__ == 900
  if (carried && !moved) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = l[i][r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        float2* row = softmax + (warp * kRowTiles + i) * 16 + r * 8 + lane / 4;
        if (lane % 4 == 0) ptx::add_global(&row->y, sum);
        l[i][r] = 0.0f;
      }
      float4* fragment = carry + ((warp * kRowTiles + i) * (kHeadDim / 8)) * 32 + lane;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        ptx::add_global4(fragment + j * 32, o[i][j]);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][j][e] = 0.0f;
      }
    }
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = l[i][r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      float2* row = softmax + (warp * kRowTiles + i) * 16 + r * 8 + lane / 4;
      alpha[r] = 0.0f;
      if (carried) {
        const float2 before = __ldcg(row);
        alpha[r] = before.x == negative_infinity() ? 0.0f : ptx::ex2(before.x - m[i][r]);
        sum = fmaf(before.y, alpha[r], sum);
        __syncwarp();
      }
      if (lane % 4 == 0) *row = make_float2(m[i][r], sum);
      l[i][r] = 0.0f;
    }
    float4* fragment = carry + ((warp * kRowTiles + i) * (kHeadDim / 8)) * 32 + lane;
    if (carried) {
#pragma unroll
      for (int j0 = 0; j0 < kHeadDim / 8; j0 += 4) {
        float4 before[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) before[j] = __ldcg(fragment + (j0 + j) * 32);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float(&a)[4] = o[i][j0 + j];
          if (alpha[0] != 0.0f) {
            a[0] = fmaf(before[j].x, alpha[0], a[0]);
            a[1] = fmaf(before[j].y, alpha[0], a[1]);
          }
          if (alpha[1] != 0.0f) {
            a[2] = fmaf(before[j].z, alpha[1], a[2]);
            a[3] = fmaf(before[j].w, alpha[1], a[3]);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float(&a)[4] = o[i][j0 + j];
          fragment[(j0 + j) * 32] = make_float4(a[0], a[1], a[2], a[3]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float(&a)[4] = o[i][j];
        fragment[j * 32] = make_float4(a[0], a[1], a[2], a[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][j][e] = 0.0f;
    }
  }
}

// Bit t: token first_key + t of a fill block lies in `keys`.
__device__ __forceinline__ uint64_t seen_tokens(int2 keys, int first_key) {
  const int begin = min(max(keys.x - first_key, 0), kFillTokens);
  const int end = min(max(keys.y - first_key, 0), kFillTokens);
  const uint64_t below_end = end == kFillTokens ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return begin == kFillTokens ? 0 : below_end & ~((uint64_t{1} << begin) - 1);
}

}  // namespace kvtile::cuda
