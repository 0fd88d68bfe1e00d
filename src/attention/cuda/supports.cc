// The support predicates of the CUDA engines.
#include "src/attention/cuda/supports.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

#include "src/attention/cuda/cost.h"
#include "src/attention/cuda/rows_shape.h"
#include "src/attention/cuda/sm80/tile_plan.h"
#include "src/core/cache_params.h"
#include "src/core/status.h"

namespace kvtile::cuda {
namespace {

// What the kernels of both engines are compiled for and can read.
Status check_kernels(const AttentionCall& call, std::string_view engine) {
  KVTILE_RETURN_IF_ERROR(check_word_cache(call.cache, engine));
  const int head_dim = call.cache.format.head_dim;
  if (head_dim == 64 || head_dim == 128 || head_dim == 256) return {};
  return unsupported("head_dim", head_dim, "64, 128 or 256 on CUDA");
}

// What both tile engines take.
Status check_tiles(const AttentionCall& call, const DeviceInfo& device, std::string_view engine) {
  KVTILE_RETURN_IF_ERROR(check_kernels(call, engine));
  if (call.batch_invariant) {
    return unsupported("batch_invariant", true,
                       fmt::format("false on backend {}; cuda/rows takes it, up to {} packed rows "
                                   "a sequence",
                                   engine, kRowsMaxPackedRows));
  }
  if (device.shared_bytes_per_block < kTileMinSharedBytes) {
    return unsupported(
        "device", device.name,
        fmt::format("at least {} bytes of shared memory a block", kTileMinSharedBytes));
  }
  // Row, block and unit numbers are 32-bit.
  if (call.total_q > std::numeric_limits<int32_t>::max() / 256 / call.num_heads) {
    return unsupported("total_q", call.total_q, "fewer than 2^23 query rows over all heads");
  }
  return {};
}

}  // namespace

Status cuda_rows_supports(const AttentionCall& call, const DeviceInfo& device) {
  KVTILE_RETURN_IF_ERROR(check_kernels(call, kRowsName));
  KVTILE_RETURN_IF_ERROR(check_packed_rows(call));
  const RowsShape shape = rows_shape(call, device);
  if (shape.max_rows == 0) {
    return unsupported("device", device.name, "more shared memory a block");
  }
  const RowsPlan plan = make_rows_plan(shape, device.num_sms);
  const int64_t blocks = plan.launch_states(shape.num_kv_heads);
  constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();
  const int combine_blocks = call.num_heads * (call.cache.format.head_dim / kRowsCombineDims);
  if (blocks > kMaxGrid || call.total_q > kMaxGrid / std::max(1, combine_blocks)) {
    return unsupported("total_q", call.total_q, "at most 2^31 thread blocks");
  }
  return {};
}

Status cuda_tile_supports(const AttentionCall& call, const DeviceInfo& device) {
  return check_tiles(call, device, kTileName);
}

Status cuda_hopper_supports(const AttentionCall& call, const DeviceInfo& device) {
  if (device.arch != 90) {
    return unsupported("device", device.name, "compute capability 9.0 on backend cuda/hopper");
  }
  return check_tiles(call, device, kHopperName);
}

}  // namespace kvtile::cuda
