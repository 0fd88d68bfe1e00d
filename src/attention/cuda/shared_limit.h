// The limit of dynamic shared memory of a kernel is the process's, not a launch's: calls of other
// threads meet it too. It must therefore never follow a call's own size, and is always all that a
// thread block of the device can have.
#pragma once

#include <cuda_runtime.h>

namespace kvtile::cuda {

template <class... Params>
cudaError_t allow_shared_memory(void (*kernel)(Params...), int shared_bytes_per_block) {
  cudaFuncAttributes attributes;
  if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) {
    return error;
  }
  return cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      shared_bytes_per_block - static_cast<int>(attributes.sharedSizeBytes));
}

}  // namespace kvtile::cuda
