// The body of an instance file: KVTILE_ROWS_INSTANCE(key code, value code, head_dim).
#pragma once

#include "src/attention/cuda/launch.h"
#include "src/attention/cuda/sm80/rows.cuh"
#include "src/attention/cuda/sm80/rows_launch.h"
#include "src/attention/cuda/sm90/rows_pages.cuh"
#include "src/attention/cuda/sm90/rows_verify.cuh"

namespace kvtile::cuda {

template <class Config>
cudaError_t launch_rows_config(const RowsParams& params, const RowsResidency& residency,
                               int64_t blocks, cudaStream_t stream) {
  auto launch = launch_kernel<rows_kernel<Config>, RowsParams>;
  if constexpr (Config::kTiles == 1) {
    if (params.plan.pages) launch = launch_kernel<rows_pages_kernel<Config>, RowsParams>;
  } else if constexpr (Config::kHeadDim >= 128) {
    if (params.plan.verify_heads > 0) {
      launch = launch_kernel<rows_verify_kernel<Config>, RowsParams>;
    }
  }
  return launch(dim3(static_cast<unsigned>(blocks)), 32 * residency.warps,
                static_cast<size_t>(residency.shared_bytes), params.early_launch, stream, params);
}

template <KeyCode kKey, ValueCode kValue, int kHeadDim>
cudaError_t launch_rows(const RowsParams& params, const RowsResidency& residency, int64_t blocks,
                        cudaStream_t stream) {
  switch (params.plan.rows) {
    case 8:
      return launch_rows_config<RowsConfig<kKey, kValue, kHeadDim, 1>>(params, residency, blocks,
                                                                       stream);
    case 16:
      return launch_rows_config<RowsConfig<kKey, kValue, kHeadDim, 2>>(params, residency, blocks,
                                                                       stream);
    default:
      return launch_rows_config<RowsConfig<kKey, kValue, kHeadDim, 4>>(params, residency, blocks,
                                                                       stream);
  }
}

}  // namespace kvtile::cuda

#define KVTILE_ROWS_INSTANCE(key, value, head_dim)                                                \
  namespace kvtile::cuda {                                                                        \
  template cudaError_t launch_rows<key, value, head_dim>(const RowsParams&, const RowsResidency&, \
                                                         int64_t, cudaStream_t);                  \
  }
