// One launch of the rows kernel for one format and head_dim; each instance is its own source file,
// so that the compilers run side by side.
#pragma once

#include <cuda_runtime.h>

#include "kvtile/slot.h"
#include "src/attention/cuda/rows_plan.h"

namespace kvtile::cuda {

struct RowsParams;

template <KeyCode kKey, ValueCode kValue, int kHeadDim>
cudaError_t launch_rows(const RowsParams& params, const RowsResidency& residency, int64_t blocks,
                        cudaStream_t stream);

}  // namespace kvtile::cuda
