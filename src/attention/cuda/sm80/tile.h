// Launching the tile engine: everything a call does, on one stream, with nothing read back.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "src/attention/cuda/sm80/tile_params.h"

namespace kvtile::cuda {

// An early launch may start before the launches ahead of it end: its kernel waits itself for what
// it reads (griddepcontrol, sm_90 and later).
// `cluster` neighbouring thread blocks form a cluster.
template <typename... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, int cluster, int threads,
                            size_t shared_bytes, bool early, cudaStream_t stream,
                            const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

template <typename... Params>
cudaError_t launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                          bool early, cudaStream_t stream,
                          const std::type_identity_t<Params>&... params) {
  return launch_clusters(kernel, grid, 1, threads, shared_bytes, early, stream, params...);
}

// An attention kernel over the image, for one head_dim, and what it wants of the plan; launches
// return their own error.
struct TileAttention {
  TileShape shape;
  int min_shared_bytes;  // of a thread block
  cudaError_t (*prepare)(
      int shared_bytes_per_block);  // raises the shared memory limit, once a call
  cudaError_t (*launch)(const TileParams& params, const TileStep& at, int shared_bytes_per_block,
                        bool early, cudaStream_t stream);
};

extern const TileAttention kTileAttention64, kTileAttention128, kTileAttention128Small,
    kTileAttention256, kHopperAttention64, kHopperAttention128, kHopperAttention256;

// For head_dim 64, 128 or 256: with mma.sync, what suits a device; with wgmma.
const TileAttention& tile_attention(int head_dim, int shared_bytes_per_block);
const TileAttention& hopper_attention(int head_dim);

cudaError_t launch_tile_rotate(const TileParams& params, const TileStep& at, cudaStream_t stream);
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
