// The rows backend: decode and speculative verify straight from the packed cache, any number of
// query rows but built for tiles of up to 32 packed rows (query x head of a group). Two launches;
// nothing is allocated, synchronised or read back, and no host branch depends on device data.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kvtile/attention.h"
#include "kvtile/run.h"
#include "kvtile/status.h"
#include "src/core/device.h"

namespace kvtile::cuda {

// Exact and free of lengths; monotone in total_q.
Status cuda_rows_workspace_bytes(const AttentionCall& call, const DeviceInfo& device,
                                 size_t* bytes);

// Launches on `stream`. The call is valid and supported; all its pointers are the device's.
Status cuda_rows_run(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
                     cudaStream_t stream);

}  // namespace kvtile::cuda
