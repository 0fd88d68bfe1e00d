// Host side of the tile backend: the plan, the workspace, and the launch sequence.
#include "src/attention/cuda/tile_backend.h"

#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/supports.h"
#include "src/core/status.h"

namespace kvtile::cuda {
namespace {

TilePlan plan_for(const AttentionCall& call, const DeviceInfo& device) {
  return make_tile_plan(call, TileDevice{device.num_sms, device.arch >= 90});
}

}  // namespace

Status cuda_tile_workspace_bytes(const AttentionCall& call, const DeviceInfo& device,
                                 size_t* bytes) {
  KVTILE_RETURN_IF_ERROR(cuda_tile_supports(call, device));
  *bytes = call.total_q == 0 || call.num_seqs == 0
               ? 0
               : static_cast<size_t>(plan_for(call, device).bytes);
  return {};
}

Status cuda_tile_run(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
                     cudaStream_t stream, int64_t* tile_tokens) {
  size_t needed = 0;
  KVTILE_RETURN_IF_ERROR(cuda_tile_workspace_bytes(call, device, &needed));
  if (workspace.bytes < needed) {
    return Status(StatusCode::kWorkspaceTooSmall,
                  fmt::format("workspace: got {} bytes, wanted {}", workspace.bytes, needed));
  }
  if (call.total_q == 0) return {};
  const TilePlan plan = plan_for(call, device);
  if (tile_tokens != nullptr) *tile_tokens = plan.tile_tokens;
  return cuda_status("tile", run_tile(make_tile_params(call, plan, workspace.data),
                                      device.shared_bytes_per_block, stream));
}

}  // namespace kvtile::cuda
