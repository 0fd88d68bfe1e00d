#include "tests/cuda/jitter.h"

namespace kvtile::testing {
namespace {

__global__ void jitter_kernel(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks * (1 + blockIdx.x % 3)) {
  }
}

}  // namespace

cudaError_t launch_jitter(int blocks, long long clocks, cudaStream_t stream) {
  jitter_kernel<<<static_cast<unsigned>(blocks), 64, 0, stream>>>(clocks);
  return cudaGetLastError();
}

}  // namespace kvtile::testing
