// Launches combine.cuh.
#include <algorithm>

#include "src/attention/cuda/combine.cuh"
#include "src/attention/cuda/launch.h"
#include "src/attention/cuda/rows_params.h"

namespace kvtile::cuda {

cudaError_t launch_rows_combine(const RowsParams& params, int head_dim, cudaStream_t stream) {
  const auto launch = head_dim == 64    ? launch_kernel<rows_combine_kernel<64>, RowsParams>
                      : head_dim == 128 ? launch_kernel<rows_combine_kernel<128>, RowsParams>
                                        : launch_kernel<rows_combine_kernel<256>, RowsParams>;
  const int64_t blocks = params.num_rows * params.a.num_heads * (head_dim / kRowsCombineDims);
  return launch(dim3(static_cast<unsigned>(blocks)),
                32 * std::min(kCombineMaxWarps, params.plan.num_states()), 0, params.early_launch,
                stream, params);
}

}  // namespace kvtile::cuda
