// What a CUDA row of the backend table checks of a call before it launches anything: pointers that
// the device cannot read, a stream of another device, strides its word loads cannot follow.
#pragma once

#include "kvtile/attention.h"
#include "kvtile/status.h"
#include "src/core/device.h"

namespace kvtile::cuda {

// Slots are read by 2-byte words.
Status check_even_strides(const char* backend, const PagedCache& cache);

Status check_call_pointers(const char* backend, const AttentionCall& call, Workspace workspace,
                           const DeviceInfo& device);

}  // namespace kvtile::cuda
