// The tile backend: any number of query rows, built for more than 32 packed rows of a KV head.
// Nothing is allocated, synchronised or read back; launches depend on the call's shape and hints
// alone, so a call can be captured and replayed after its device arrays changed.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kvtile/attention.h"
#include "kvtile/run.h"
#include "kvtile/status.h"
#include "src/core/device.h"

namespace kvtile::cuda {

// Exact and free of lengths; monotone in total_q.
Status cuda_tile_workspace_bytes(const AttentionCall& call, const DeviceInfo& device,
                                 size_t* bytes);

// Launches on `stream`. The call is valid and supported; all its pointers are the device's.
// *tile_tokens, if not null, is what one tile of a context holds.
Status cuda_tile_run(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
                     cudaStream_t stream, int64_t* tile_tokens = nullptr);

}  // namespace kvtile::cuda
