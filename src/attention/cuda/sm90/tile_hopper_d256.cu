// The hopper attention at head_dim 256.
#include "src/attention/cuda/sm90/tile_hopper_instance.cuh"

namespace kvtile::cuda {
KVTILE_HOPPER_ATTENTION(kHopperAttention256, 256);
}  // namespace kvtile::cuda
