// Launching the tile engine: everything a call does, on one stream, with nothing read back.
#pragma once

#include <cuda_runtime.h>

#include "src/attention/cuda/sm80/tile_params.h"

namespace kvtile::cuda {

// Kernels compiled for one head_dim; each launch returns the launch's own error.
struct TileKernels {
  cudaError_t (*attention)(const TileParams& params, const TileStep& at, int shared_bytes_per_block,
                           bool early, cudaStream_t stream);
  cudaError_t (*rotate)(const TileParams& params, const TileStep& at, cudaStream_t stream);
  cudaError_t (*merge)(const TileParams& params, const TileStep& at, cudaStream_t stream);
  int min_shared_bytes;  // of a thread block of the attention kernel
};

extern const TileKernels kTileKernels64, kTileKernels128, kTileKernels128Small, kTileKernels256;

// The kernels for head_dim 64, 128 or 256 that suit a device.
const TileKernels& tile_kernels(int head_dim, int shared_bytes_per_block);

cudaError_t launch_tile_sequences(const TileParams& params, cudaStream_t stream);
// On the SMs that do not attend if `early`, on all of them otherwise.
cudaError_t launch_tile_fill(const TileParams& params, const TileStep& at, bool early,
                             cudaStream_t stream);

TileParams make_tile_params(const AttentionCall& call, const TilePlan& plan, void* workspace);
cudaError_t run_tile(const TileParams& params, int shared_bytes_per_block, cudaStream_t stream);

}  // namespace kvtile::cuda
