// A kernel that keeps part of the GPU busy for a while: what runs beside it is scheduled otherwise
// each time.
#pragma once

#include <cuda_runtime.h>

namespace kvtile::testing {

cudaError_t launch_jitter(int blocks, long long clocks, cudaStream_t stream);

}  // namespace kvtile::testing
