// The tile engine at head_dim 128 for devices with 99 KB of shared memory a block: an eighth of the
// queries moves to registers.
#include "src/attention/cuda/sm80/tile_instance.cuh"

namespace kvtile::cuda {
static_assert(TileInstance<128, 7>::kMinSharedBytes <= kTileMinSharedBytes);
KVTILE_TILE_KERNELS(kTileKernels128Small, 128, 7);
}  // namespace kvtile::cuda
