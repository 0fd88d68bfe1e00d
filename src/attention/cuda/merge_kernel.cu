// merge_states() on the device: one warp a row, the arithmetic of attention/merge.cc (float64,
// states in order), so that both give the same numbers. An empty state's payload is never read; a
// lone state that is not empty is copied.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "src/attention/cuda/merge_kernel.h"

namespace kvtile::cuda {
namespace {

constexpr int kWarps = 4;

__device__ void store_element(void* data, DType dtype, int64_t index, float x) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = x;
      break;
    case DType::kFloat16:
      static_cast<__half*>(data)[index] = __float2half_rn(x);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(x);
      break;
  }
}

__global__ void __launch_bounds__(32 * kWarps)
    merge_kernel(const __grid_constant__ MergeParams params) {
  constexpr double kInfinity = __builtin_huge_val();
  // Weight of each state; negative for an empty one.
  __shared__ double weights[kWarps][kMergeMaxStates];
  double* weight = weights[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < params.num_rows;
       row += stride) {
    const int64_t token = row / params.num_heads, head = row % params.num_heads;
    double top = -kInfinity;
    bool is_nan = false;
    int num_live = 0, live = 0;
    for (int i = 0; i < params.num_states; ++i) {
      const MergeState& state = params.states[i];
      const double lse = state.lse[head * state.lse_stride_head + token * state.lse_stride_token];
      is_nan |= lse != lse || lse == kInfinity;
      top = fmax(top, lse);
      if (lane == 0) weight[i] = lse;
      if (lse == -kInfinity) continue;
      ++num_live;
      live = i;
    }
    __syncwarp();
    for (int i = lane; i < params.num_states; i += 32) {
      weight[i] = weight[i] == -kInfinity ? -1.0 : exp(weight[i] - top);
    }
    __syncwarp();
    double total = 0.0;
    for (int i = 0; i < params.num_states; ++i) total += weight[i] < 0.0 ? 0.0 : weight[i];
    const double nan = kInfinity - kInfinity;
    const auto element = [&](int i, int d) {
      const MergeState& state = params.states[i];
      return state.out[token * state.out_stride_token + head * state.out_stride_head + d];
    };
    for (int d = lane; d < params.head_dim; d += 32) {
      double sum = 0.0;
      for (int i = 0; i < params.num_states; ++i) {
        if (weight[i] < 0.0) continue;
        sum += weight[i] * element(i, d);
      }
      const float value = is_nan          ? static_cast<float>(nan)
                          : num_live == 0 ? 0.0f
                          : num_live == 1 ? element(live, d)
                                          : static_cast<float>(sum / total);
      store_element(params.out, params.dtype,
                    token * params.out_stride_token + head * params.out_stride_head + d, value);
    }
    if (params.lse != nullptr && lane == 0) {
      const double merged = is_nan ? nan : num_live > 1 ? top + log(total) : top;
      params.lse[head * params.lse_stride_head + token * params.lse_stride_token] =
          static_cast<float>(merged);
    }
    __syncwarp();
  }
}

}  // namespace

cudaError_t launch_merge(const MergeParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  const int64_t blocks = std::min((params.num_rows + kWarps - 1) / kWarps, kMaxBlocks);
  merge_kernel<<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kvtile::cuda
