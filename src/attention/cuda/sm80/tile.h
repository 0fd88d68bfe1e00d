// Launching the tile engine: everything a call does, on one stream, with nothing read back.
#pragma once

#include <cuda_runtime.h>

#include "src/attention/cuda/sm80/tile_params.h"

namespace kvtile::cuda {

// An attention kernel over the image, for one head_dim, and what it wants of the plan; a launch
// returns its own error.
struct TileAttention {
  TileShape shape;
  int min_shared_bytes;  // of a thread block
  cudaError_t (*launch)(const TileParams& params, const TileStep& at, int shared_bytes_per_block,
                        bool early, cudaStream_t stream);
};

extern const TileAttention kTileAttention64, kTileAttention128, kTileAttention128Small,
    kTileAttention256, kHopperAttention64, kHopperAttention128, kHopperAttention256;

// For head_dim 64, 128 or 256: with mma.sync, what suits a device; with wgmma.
const TileAttention& tile_attention(int head_dim, int shared_bytes_per_block);
const TileAttention& hopper_attention(int head_dim);

cudaError_t launch_tile_rotate(const TileParams& params, const TileStep& at, bool early,
                               cudaStream_t stream);
cudaError_t launch_tile_merge(const TileParams& params, const TileStep& at, cudaStream_t stream);
cudaError_t launch_tile_sequences(const TileParams& params, cudaStream_t stream);
// `early`: may start before the launches ahead of it end. On the SMs that do not attend if that
// leaves some, on all of them otherwise.
cudaError_t launch_tile_fill(const TileParams& params, const TileStep& at, bool early,
                             cudaStream_t stream);

TileParams make_tile_params(const AttentionCall& call, const TilePlan& plan, void* workspace);
// The plan was made for the kernel's shape.
cudaError_t run_tile(const TileParams& params, const TileAttention& attention,
                     int shared_bytes_per_block, cudaStream_t stream);

}  // namespace kvtile::cuda
