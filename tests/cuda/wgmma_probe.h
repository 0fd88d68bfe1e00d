// One wgmma product on the current device, for wgmma_gpu_test.cc.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvtile::testing {

// out[64][128] = A B of fp16 words on the device: A is [64][16]; B is [128 tokens][16 dimensions],
// a key plane, or [128 dimensions][16 tokens], a value plane. Hopper only.
cudaError_t launch_wgmma_probe(const uint16_t* a, const uint16_t* b, bool values, float* out);

}  // namespace kvtile::testing
