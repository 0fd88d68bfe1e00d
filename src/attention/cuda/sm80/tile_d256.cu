// The tile engine at head_dim 256.
#include "src/attention/cuda/sm80/tile_instance.cuh"

namespace kvtile::cuda {
static_assert(TileInstance<256, 8>::kMinSharedBytes <= kTileMinSharedBytes);
KVTILE_TILE_KERNELS(kTileKernels256, 256, 8);
}  // namespace kvtile::cuda
