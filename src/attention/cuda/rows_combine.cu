// Launches combine.cuh.
#include <algorithm>

#include "src/attention/cuda/combine.cuh"
#include "src/attention/cuda/rows_params.h"
#include "src/attention/cuda/rows_start.cuh"

namespace kvtile::cuda {

cudaError_t launch_rows_combine(const RowsParams& params, int head_dim, cudaStream_t stream) {
  const auto kernel = head_dim == 64    ? rows_combine_kernel<64>
                      : head_dim == 128 ? rows_combine_kernel<128>
                                        : rows_combine_kernel<256>;
  return launch_rows_kernel(kernel, params,
                            params.a.total_q * params.a.num_heads * (head_dim / kRowsCombineDims),
                            32 * std::min(kCombineMaxWarps, params.plan.num_states()), 0, stream);
}

}  // namespace kvtile::cuda
