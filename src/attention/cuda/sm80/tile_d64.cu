// The tile engine at head_dim 64.
#include "src/attention/cuda/sm80/tile_instance.cuh"

namespace kvtile::cuda {
KVTILE_TILE_ATTENTION(kTileAttention64, 64, 0);
}  // namespace kvtile::cuda
