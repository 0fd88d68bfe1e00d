// The hopper attention at head_dim 128.
#include "src/attention/cuda/sm90/tile_hopper_instance.cuh"

namespace kvtile::cuda {
KVTILE_HOPPER_ATTENTION(kHopperAttention128, 128);
}  // namespace kvtile::cuda
