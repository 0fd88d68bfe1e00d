// What the merge kernel reads: partial states by value, every stride resolved.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvtile/slot.h"

namespace kvtile::cuda {

// States of one launch: they travel as kernel parameters, of which there are 4 KB.
inline constexpr int kMergeMaxStates = 64;

struct MergeState {
  const float* out = nullptr;
  const float* lse = nullptr;
  int64_t out_stride_token = 0, out_stride_head = 0, lse_stride_head = 0, lse_stride_token = 0;
};

struct MergeParams {
  MergeState states[kMergeMaxStates];
  void* out = nullptr;
  float* lse = nullptr;  // or null
  int64_t out_stride_token = 0, out_stride_head = 0, lse_stride_head = 0, lse_stride_token = 0;
  int64_t num_rows = 0;  // total_q * num_heads
  int num_states = 0, num_heads = 0, head_dim = 0;
  DType dtype = DType::kFloat32;
};

cudaError_t launch_merge(const MergeParams& params, cudaStream_t stream);

}  // namespace kvtile::cuda
