// One head_dim of the tile engine; a .cu file holds one KVTILE_TILE_KERNELS line.
#pragma once

#include "src/attention/cuda/launch.h"
#include "src/attention/cuda/sm80/tile.cuh"
#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/sm80/tile_merge.cuh"

namespace kvtile::cuda {

template <int kHeadDim, int kSharedSteps>
struct TileInstance {
  static constexpr int kRowTiles = tile_row_tiles(kHeadDim);
  static constexpr int kPlaneBytes = plane_bytes(kBlockTokens, kHeadDim);
  static constexpr int kQueryBytes = kTileWarps * kRowTiles * kSharedSteps * 32 * kChunkBytes;
  static constexpr int kStaticBytes = sizeof(TileShared<16 * kTileWarps * kRowTiles>);
  static constexpr int kMinSharedBytes = kStaticBytes + kQueryBytes + 2 * kPlaneBytes;

  static int stages(int shared_bytes_per_block) {
    const int fitting = (shared_bytes_per_block - kStaticBytes - kQueryBytes) / (2 * kPlaneBytes);
    return fitting < kMaxStages ? fitting : kMaxStages;
  }
  static int dynamic_bytes(int shared_bytes_per_block) {
    return kQueryBytes + stages(shared_bytes_per_block) * 2 * kPlaneBytes;
  }

  static cudaError_t attention(const TileParams& params, const TileStep& at,
                               int shared_bytes_per_block, bool early, cudaStream_t stream) {
    return launch_kernel<tile_attention_kernel<kHeadDim, kRowTiles, kSharedSteps>>(
        dim3(params.plan.num_ctas), kTileThreads, dynamic_bytes(shared_bytes_per_block), early,
        stream, params, at, stages(shared_bytes_per_block));
  }
  static cudaError_t rotate(const TileParams& params, const TileStep& at, cudaStream_t stream) {
    return launch_kernel<tile_rotate_kernel<kHeadDim>>(
        dim3(params.plan.row_blocks, kRotateParts), kPrepareThreads, 0, false, stream, params, at);
  }
  static cudaError_t merge(const TileParams& params, const TileStep& at, cudaStream_t stream) {
    return launch_kernel<tile_merge_kernel<kHeadDim>>(
        dim3(params.plan.row_blocks, kHeadDim / 64), kPrepareThreads, 0, false, stream, params, at);
  }
};

// One stage is the least the ring works with.
#define KVTILE_TILE_KERNELS(name, head_dim, shared_steps)                           \
  extern const TileKernels name = {TileInstance<head_dim, shared_steps>::attention, \
                                   TileInstance<head_dim, shared_steps>::rotate,    \
                                   TileInstance<head_dim, shared_steps>::merge,     \
                                   TileInstance<head_dim, shared_steps>::kMinSharedBytes}

}  // namespace kvtile::cuda
