// Element access and the Hadamard transform of one row, shared by the tile engine's small kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kvtile/slot.h"

namespace kvtile::cuda {

inline constexpr int kPrepareThreads = 256;

__device__ __forceinline__ float load_element(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(data)[index]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}

// Elements index, index + 1, ...: asked for together, under one look at the dtype.
template <int kCount>
__device__ __forceinline__ void load_elements(const void* data, DType dtype, int64_t index,
                                              float (&x)[kCount]) {
  const auto convert = [&x, index](const auto* elements, const auto& to_float) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] = to_float(elements[index + e]);
  };
  if (dtype == DType::kFloat32) {
    convert(static_cast<const float*>(data), [](float element) { return element; });
  } else if (dtype == DType::kFloat16) {
    convert(static_cast<const __half*>(data), [](__half element) { return __half2float(element); });
  } else {
    convert(static_cast<const __nv_bfloat16*>(data),
            [](__nv_bfloat16 element) { return __bfloat162float(element); });
  }
}

__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t index, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = x;
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(data)[index] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(x);
  }
}

// One warp: the orthonormal Hadamard transform of a row, lane l holding elements kPer * l + e.
template <int kPer>
__device__ __forceinline__ void rotate_row(float (&x)[kPer]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 1; half < kPer; half *= 2) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if ((e & half) == 0) {
        const float a = x[e], b = x[e + half];
        x[e] = a + b;
        x[e + half] = a - b;
      }
    }
  }
#pragma unroll
  for (int half = 1; half < 32; half *= 2) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      const float other = __shfl_xor_sync(0xffffffffu, x[e], half);
      x[e] = (lane & half) != 0 ? other - x[e] : x[e] + other;
    }
  }
  constexpr float kNorm = kPer == 2 ? 0.125f : kPer == 4 ? 0x1.6a09e6p-4f : 0.0625f;
#pragma unroll
  for (int e = 0; e < kPer; ++e) x[e] *= kNorm;
}

}  // namespace kvtile::cuda
