// Host side of the tile backends: the support predicate, the plan, and the launch sequence.
#include <limits>
#include <string>

#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/cuda/tile_backend.h"

namespace kvtile::cuda {
namespace {

Status refused(StatusCode code, const char* argument, const std::string& got,
               const std::string& wanted) {
  return Status(code, std::string(argument) + ": got " + got + ", wanted " + wanted);
}

// For a head_dim that has one.
const TileAttention& attention_of(TileEngine engine, const AttentionCall& call,
                                  const DeviceInfo& device) {
  const int head_dim = call.cache.format.head_dim;
  return engine == TileEngine::kHopper ? hopper_attention(head_dim)
                                       : tile_attention(head_dim, device.shared_bytes_per_block);
}

TilePlan plan_for(TileEngine engine, const AttentionCall& call, const DeviceInfo& device) {
  return make_tile_plan(call, TileDevice{device.num_sms, device.arch >= 90},
                        attention_of(engine, call, device).shape);
}

}  // namespace

Status cuda_tile_supports(TileEngine engine, const AttentionCall& call, const DeviceInfo& device) {
  if (engine == TileEngine::kHopper && device.arch != 90) {
    return refused(StatusCode::kUnsupported, "device", device.name,
                   "compute capability 9.0 on backend cuda/hopper");
  }
  const int head_dim = call.cache.format.head_dim;
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    return refused(StatusCode::kUnsupported, "head_dim", std::to_string(head_dim),
                   "64, 128 or 256 on CUDA");
  }
  const int least = attention_of(engine, call, device).min_shared_bytes;
  if (device.shared_bytes_per_block < least) {
    return refused(StatusCode::kUnsupported, "device", device.name,
                   "at least " + std::to_string(least) + " bytes of shared memory a block");
  }
  // Row, block and unit numbers are 32-bit.
  if (call.total_q > std::numeric_limits<int32_t>::max() / 256 / call.num_heads) {
    return refused(StatusCode::kUnsupported, "total_q", std::to_string(call.total_q),
                   "fewer than 2^23 query rows over all heads");
  }
  return {};
}

Status cuda_tile_workspace_bytes(TileEngine engine, const AttentionCall& call,
                                 const DeviceInfo& device, size_t* bytes) {
  if (Status status = cuda_tile_supports(engine, call, device); !status.ok()) return status;
  *bytes = call.total_q == 0 || call.num_seqs == 0
               ? 0
               : static_cast<size_t>(plan_for(engine, call, device).bytes);
  return {};
}

Status cuda_tile_run(TileEngine engine, const AttentionCall& call, Workspace workspace,
                     const DeviceInfo& device, cudaStream_t stream, int64_t* tile_tokens) {
  size_t needed = 0;
  if (Status status = cuda_tile_workspace_bytes(engine, call, device, &needed); !status.ok()) {
    return status;
  }
  if (workspace.bytes < needed) {
    return refused(StatusCode::kWorkspaceTooSmall, "workspace",
                   std::to_string(workspace.bytes) + " bytes", std::to_string(needed));
  }
  if (call.total_q == 0) return {};
  const TilePlan plan = plan_for(engine, call, device);
  if (tile_tokens != nullptr) *tile_tokens = plan.tile_tokens;
  return cuda_status("tile", run_tile(make_tile_params(call, plan, workspace.data),
                                      attention_of(engine, call, device),
                                      device.shared_bytes_per_block, stream));
}

}  // namespace kvtile::cuda
