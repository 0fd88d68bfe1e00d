// The tile engine at head_dim 128.
#include "src/attention/cuda/sm80/tile_instance.cuh"

namespace kvtile::cuda {
KVTILE_TILE_ATTENTION(kTileAttention128, 128, 8);
}  // namespace kvtile::cuda
