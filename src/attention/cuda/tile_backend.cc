// Host side of the tile backends: the plan, the workspace, and the launch sequence.
#include "src/attention/cuda/tile_backend.h"

#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/supports.h"
#include "src/core/status.h"

namespace kvtile::cuda {
namespace {

TilePlan plan_for(const AttentionCall& call, const DeviceInfo& device,
                  const TileAttention& attention) {
  return make_tile_plan(call, TileDevice{device.num_sms, device.arch >= 90}, attention.shape);
}

// The call is supported.
size_t bytes_of(const AttentionCall& call, const DeviceInfo& device,
                const TileAttention& attention) {
  if (call.total_q == 0 || call.num_seqs == 0) return 0;
  return static_cast<size_t>(plan_for(call, device, attention).bytes);
}

Status run(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
           const TileAttention& attention, cudaStream_t stream, int64_t* tile_tokens) {
  if (const size_t needed = bytes_of(call, device, attention); workspace.bytes < needed) {
    return Status(StatusCode::kWorkspaceTooSmall,
                  fmt::format("workspace: got {} bytes, wanted {}", workspace.bytes, needed));
  }
  if (call.total_q == 0) return {};
  const TilePlan plan = plan_for(call, device, attention);
  if (tile_tokens != nullptr) *tile_tokens = plan.tile_tokens;
  return cuda_status("tile", run_tile(make_tile_params(call, plan, workspace.data), attention,
                                      device.shared_bytes_per_block, stream));
}

const TileAttention& portable(const AttentionCall& call, const DeviceInfo& device) {
  return tile_attention(call.cache.format.head_dim, device.shared_bytes_per_block);
}

const TileAttention& hopper(const AttentionCall& call) {
  return hopper_attention(call.cache.format.head_dim);
}

}  // namespace

Status cuda_tile_workspace_bytes(const AttentionCall& call, const DeviceInfo& device,
                                 size_t* bytes) {
  KVTILE_RETURN_IF_ERROR(cuda_tile_supports(call, device));
  *bytes = bytes_of(call, device, portable(call, device));
  return {};
}

Status cuda_hopper_workspace_bytes(const AttentionCall& call, const DeviceInfo& device,
                                   size_t* bytes) {
  KVTILE_RETURN_IF_ERROR(cuda_hopper_supports(call, device));
  *bytes = bytes_of(call, device, hopper(call));
  return {};
}

Status cuda_tile_run(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
                     cudaStream_t stream, int64_t* tile_tokens) {
  KVTILE_RETURN_IF_ERROR(cuda_tile_supports(call, device));
  return run(call, workspace, device, portable(call, device), stream, tile_tokens);
}

Status cuda_hopper_run(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
                       cudaStream_t stream, int64_t* tile_tokens) {
  KVTILE_RETURN_IF_ERROR(cuda_hopper_supports(call, device));
  return run(call, workspace, device, hopper(call), stream, tile_tokens);
}

}  // namespace kvtile::cuda
