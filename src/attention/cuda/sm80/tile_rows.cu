// Queries and merges of the tile engines: the kernels do not depend on how a row block is attended.
#include "src/attention/cuda/launch.h"
#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/sm80/tile_merge.cuh"

namespace kvtile::cuda {
namespace {

template <int kHeadDim>
cudaError_t rotate(const TileParams& params, const TileStep& at, bool early, cudaStream_t stream) {
  return launch_kernel<tile_rotate_kernel<kHeadDim>>(dim3(params.plan.row_blocks, kRotateParts),
                                                     kPrepareThreads, 0, early, stream, params, at);
}

template <int kHeadDim>
cudaError_t merge(const TileParams& params, const TileStep& at, cudaStream_t stream) {
  return launch_kernel<tile_merge_kernel<kHeadDim>>(dim3(params.plan.row_blocks, kHeadDim / 64),
                                                    kPrepareThreads, 0, false, stream, params, at);
}

}  // namespace

cudaError_t launch_tile_rotate(const TileParams& params, const TileStep& at, bool early,
                               cudaStream_t stream) {
  const auto launch = params.plan.head_dim == 64    ? rotate<64>
                      : params.plan.head_dim == 128 ? rotate<128>
                                                    : rotate<256>;
  return launch(params, at, early, stream);
}

cudaError_t launch_tile_merge(const TileParams& params, const TileStep& at, cudaStream_t stream) {
  const auto launch = params.plan.head_dim == 64    ? merge<64>
                      : params.plan.head_dim == 128 ? merge<128>
                                                    : merge<256>;
  return launch(params, at, stream);
}

}  // namespace kvtile::cuda
