// The hopper attention at head_dim 64.
#include "src/attention/cuda/sm90/tile_hopper_instance.cuh"

namespace kvtile::cuda {
KVTILE_HOPPER_ATTENTION(kHopperAttention64, 64);
}  // namespace kvtile::cuda
