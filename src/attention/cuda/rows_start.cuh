// How the kernels of the rows backend are started.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "src/attention/cuda/rows_params.h"

namespace kvtile::cuda {

// A launch that may begin before the one ahead of it in the stream has ended: both kernels wait for
// its results (grid_dependency_wait) before they read any.
inline cudaError_t launch_rows_kernel(void (*kernel)(RowsParams), const RowsParams& params,
                                      int64_t blocks, int threads, int shared_bytes,
                                      cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = params.early_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace kvtile::cuda
