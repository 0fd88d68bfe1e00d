// Launches combine.cuh.
#include <algorithm>

#include "src/attention/cuda/combine.cuh"
#include "src/attention/cuda/rows_params.h"

namespace kvtile::cuda {

cudaError_t launch_rows_combine(const RowsParams& params, int head_dim, int arch,
                                cudaStream_t stream) {
  const int64_t blocks = params.a.total_q * params.a.num_heads;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim =
      dim3(32u * static_cast<unsigned>(std::min(kCombineMaxWarps, params.plan.num_states())));
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  if (arch >= 90) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  switch (head_dim) {
    case 64:
      return cudaLaunchKernelEx(&config, rows_combine_kernel<64>, params);
    case 128:
      return cudaLaunchKernelEx(&config, rows_combine_kernel<128>, params);
    default:
      return cudaLaunchKernelEx(&config, rows_combine_kernel<256>, params);
  }
}

}  // namespace kvtile::cuda
