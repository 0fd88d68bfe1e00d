// Four lanes share a row: lane q of a quad holds coordinates 8k + 2q and 8k + 2q + 1 of each chunk
// k of eight, as x[2k] and x[2k + 1]. That is what ldmatrix delivers, it keeps the sums over
// d mod 8 of docs/format.md inside a lane, and two of the Hadamard stages inside a shuffle.
#pragma once

#include <cstdint>

namespace kvtile::cuda {

inline constexpr unsigned kFullMask = 0xffffffffu;

// Unnormalised Sylvester Hadamard transform, stages in increasing distance, each sum rounded once:
// the bits of the CPU's.
template <int kChunks>
__device__ __forceinline__ void hadamard_quad(float (&x)[2 * kChunks], int quad_lane) {
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const float a = x[2 * k], b = x[2 * k + 1];
    x[2 * k] = __fadd_rn(a, b);
    x[2 * k + 1] = __fsub_rn(a, b);
  }
#pragma unroll
  for (int step = 1; step <= 2; ++step) {
    // The upper lane of a pair holds b of (a + b, a - b): a product with -1 is exact.
    const float sign = (quad_lane & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(kFullMask, x[i], step));
    }
  }
#pragma unroll
  for (int step = 1; step < kChunks; step *= 2) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if ((k & step) != 0) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float a = x[2 * k + e], b = x[2 * (k + step) + e];
        x[2 * k + e] = __fadd_rn(a, b);
        x[2 * (k + step) + e] = __fsub_rn(a, b);
      }
    }
  }
}

// Sum over the quad of eight partial sums, two a lane, as ((0+1)+(2+3))+((4+5)+(6+7)).
__device__ __forceinline__ float sum_of_eight(float even, float odd) {
  float sum = __fadd_rn(even, odd);
  sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
}

// Byte i of each lane's word belongs to chunk i; afterwards the word of lane q is chunk q, bytes in
// lane order.
__device__ __forceinline__ uint32_t transpose_quad(uint32_t word, int quad_lane) {
  const uint32_t near = __shfl_xor_sync(kFullMask, word, 1);
  word = __byte_perm(word, near, (quad_lane & 1) == 0 ? 0x6240 : 0x3715);
  const uint32_t far = __shfl_xor_sync(kFullMask, word, 2);
  return __byte_perm(word, far, (quad_lane & 2) == 0 ? 0x5410 : 0x3276);
}

}  // namespace kvtile::cuda
