// The tile engine at head_dim 64.
#include "src/attention/cuda/sm80/tile_instance.cuh"

namespace kvtile::cuda {
static_assert(TileInstance<64, 0>::kMinSharedBytes <= kTileMinSharedBytes);
KVTILE_TILE_KERNELS(kTileKernels64, 64, 0);
}  // namespace kvtile::cuda
