// One head_dim of the hopper attention; a .cu file holds one KVTILE_HOPPER_ATTENTION line.
#pragma once

#include "src/attention/cuda/launch.h"
#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/sm90/tile_hopper.cuh"

namespace kvtile::cuda {

template <int kHeadDim>
struct HopperInstance {
  static constexpr TileShape kShape = hopper_shape(kHeadDim);
  static constexpr int kQueryBytes = plane_bytes(kShape.rows, kHeadDim);
  static constexpr int kPlaneBytes = plane_bytes(kShape.block_tokens, kHeadDim);
  static constexpr int kSharedBytes = 227 * 1024;  // of a thread block, on sm_90
  static constexpr int kFitting =
      (kSharedBytes - static_cast<int>(sizeof(HopperShared)) - kQueryBytes) / kPlaneBytes;
  static constexpr int kPlanes = kFitting < kMaxPlanes ? kFitting : kMaxPlanes;
  static constexpr int kDynamicBytes = kQueryBytes + kPlanes * kPlaneBytes;

  static cudaError_t launch(const TileParams& params, const TileStep& at, int, bool early,
                            cudaStream_t stream) {
    return launch_kernel<hopper_attention_kernel<kHeadDim, kPlanes>>(
        dim3(params.plan.num_ctas), hopper_threads(kHeadDim), kDynamicBytes, early, stream, params,
        at);
  }
};

#define KVTILE_HOPPER_ATTENTION(name, head_dim)                              \
  extern const TileAttention name = {HopperInstance<head_dim>::kShape,       \
                                     HopperInstance<head_dim>::kSharedBytes, \
                                     HopperInstance<head_dim>::launch}

}  // namespace kvtile::cuda
