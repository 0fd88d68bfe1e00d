// Which calls the CUDA engines take: functions of a call's shape and of a device's description
// alone, so that they answer on a machine without a GPU. They name the parameter they refuse.
#pragma once

#include "kvtile/attention.h"
#include "kvtile/status.h"
#include "src/core/device.h"

namespace kvtile::cuda {

inline constexpr char kRowsName[] = "cuda/rows", kTileName[] = "cuda/tile";

Status cuda_rows_supports(const AttentionCall& call, const DeviceInfo& device);
Status cuda_tile_supports(const AttentionCall& call, const DeviceInfo& device);

}  // namespace kvtile::cuda
