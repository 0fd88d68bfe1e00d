// The row "cuda/tile" of the backend table: what it supports, and the checks of pointers and stream
// that come before its launches. Without a CUDA build it is unavailable.
#include "src/attention/cuda/backends_cuda.h"
#include "src/core/device.h"
#include "src/core/status.h"

#if defined(KVTILE_CUDA)
#include "src/attention/cuda/call_checks.h"
#include "src/attention/cuda/tile_backend.h"
#endif

namespace kvtile {
namespace {

constexpr char kName[] = "cuda/tile";

#if defined(KVTILE_CUDA)

Status supports(const AttentionCall& call) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(device_info(-1, &device));
  KVTILE_RETURN_IF_ERROR(cuda::check_even_strides(kName, call.cache));
  return cuda::cuda_tile_supports(call, *device);
}

Status tile_workspace(const AttentionCall& call, const RunOptions&, size_t* bytes) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(device_info(-1, &device));
  return cuda::cuda_tile_workspace_bytes(call, *device, bytes);
}

Status run(const AttentionCall& call, Workspace workspace, const RunOptions& options,
           RunReport* report) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(device_info(-1, &device));
  KVTILE_RETURN_IF_ERROR(check_stream(options.stream, *device));
  if (call.total_q > 0) {
    KVTILE_RETURN_IF_ERROR(cuda::check_call_pointers(kName, call, workspace, *device));
  }
  int64_t tile_tokens = 0;
  KVTILE_RETURN_IF_ERROR(cuda::cuda_tile_run(
      call, workspace, *device, static_cast<cudaStream_t>(options.stream), &tile_tokens));
  if (report != nullptr) {
    report->backend = kName;
    report->num_threads = 0;
    report->tile_tokens = tile_tokens;
  }
  return {};
}

#else

Status unavailable() {
  return Status(StatusCode::kUnavailable,
                "backend: got cuda/tile, wanted one of this build: it was made without CUDA");
}
Status supports(const AttentionCall&) { return unavailable(); }
Status tile_workspace(const AttentionCall&, const RunOptions&, size_t*) { return unavailable(); }
Status run(const AttentionCall&, Workspace, const RunOptions&, RunReport*) { return unavailable(); }

#endif

}  // namespace

const Backend kCudaTileBackend = {kName, supports, tile_workspace, run};

}  // namespace kvtile
