// How the engines' kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvtile::cuda {

// Lets a kernel have all the dynamic shared memory that a thread block of the current device can
// have. The limit is the process's, not a launch's: calls of other threads meet it too, so it never
// follows a call's own size. The driver is asked once for each kernel and device.
template <auto kKernel>
cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> raised{0};  // a bit a device
  int device = 0, most = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  // A device past the last bit is asked every time.
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((raised.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  cudaFuncAttributes attributes;
  cudaError_t error =
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kKernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) raised.fetch_or(bit, std::memory_order_release);
  return error;
}

// An early launch may start before the launches ahead of it in the stream have ended: its kernel
// waits itself for what it reads (griddepcontrol, sm_90 and later).
template <auto kKernel, typename... Params>
cudaError_t launch_kernel(dim3 grid, int threads, size_t shared_bytes, bool early,
                          cudaStream_t stream, const Params&... params) {
  if (shared_bytes > 0) {
    if (const cudaError_t error = allow_shared_memory<kKernel>(); error != cudaSuccess) {
      return error;
    }
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, params...);
}

}  // namespace kvtile::cuda
