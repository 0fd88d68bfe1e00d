// Host side of the rows backend: the plan, the workspace, and the launches.
#if defined(KVTILE_CUDA)
#include "src/attention/cuda/rows.h"

#include <algorithm>

#include "src/attention/cuda/rows_params.h"
#include "src/attention/cuda/rows_plan.h"
#include "src/attention/cuda/rows_shape.h"
#include "src/attention/cuda/sm80/rows_launch.h"
#include "src/attention/cuda/supports.h"
#include "src/codec/codebook.h"
#include "src/core/half2.h"
#include "src/core/status.h"

namespace kvtile::cuda {
namespace {

RowsResidency residency_of(const AttentionCall& call, const RowsShape& shape,
                           const DeviceInfo& device) {
  const int packed = rows_queries_per_tile(shape) * std::min(shape.group, shape.max_rows);
  return rows_residency(call.cache.format, rows_capacity(packed), device.shared_bytes_per_block,
                        rows_wide_table(device.arch));
}

// A factor that places the levels where fp16 rounds them least (weighted by how often each is used:
// 3e-5 rms for 4 bits, 9e-6 for 3), and the gain the rounded levels have over the exact ones.
struct CodebookFactor {
  float factor, gain;
};
CodebookFactor codebook_factor(KeyCode key, int head_dim) {
  const bool odd = (log2_int(head_dim) & 1) != 0;
  if (key == KeyCode::kLloydMax4) {
    return odd ? CodebookFactor{0x1.39bff04577d95p+0, 0x1.39cf03626f8f6p+0}
               : CodebookFactor{0x1.bbb549f94855ep+0, 0x1.bbcadd8dcd120p+0};
  }
  return odd ? CodebookFactor{0x1.c84da9003eea2p+0, 0x1.c86c069154421p+0}
             : CodebookFactor{0x1.42a79bbadc098p+0, 0x1.42bd33a78dd45p+0};
}

// Pages [0, n) whose first `page_bytes` bytes all lie in the pool.
uint32_t pages_within(const PagedCache& cache, const std::byte* pool_end, int64_t page_bytes) {
  const int64_t room = pool_end - cache.pages - page_bytes;
  if (room < 0 || cache.num_blocks == 0) return 0;
  const int64_t pages =
      cache.stride_block > 0 ? std::min(room / cache.stride_block + 1, cache.num_blocks) : 1;
  return static_cast<uint32_t>(std::min(pages, int64_t{1} << 31));
}

RowsParams make_rows_params(const AttentionCall& call, const RowsPlan& plan, const RowsPages& pages,
                            const RowsVerify& verify, int warps, bool wide_table,
                            Workspace workspace, int64_t states) {
  const SlotFormat& format = call.cache.format;
  RowsParams params;
  params.a = make_attention_params(call);
  params.plan = plan;
  params.partial_out = static_cast<float*>(workspace.data);
  params.partial_sums = params.partial_out + states * plan.rows * format.head_dim;
  constexpr int64_t kPositions = int64_t{1} << 31;
  params.table_pages =
      static_cast<uint32_t>(std::min(call.max_blocks, kPositions / call.cache.block_size + 1));
  params.pool_pages = static_cast<uint32_t>(std::min(call.cache.num_blocks, kPositions));
  params.pool_end =
      call.cache.pages + std::max(call.cache.pages_bytes, cache_extent_bytes(call.cache));
  // Slots are copied by whole granules.
  if ((reinterpret_cast<uintptr_t>(call.cache.pages) & 15) == 0) {
    const int64_t last =
        call.cache.slot_offset(0, call.cache.block_size - 1, call.cache.num_kv_heads - 1);
    params.straight_pages = pages_within(call.cache, params.pool_end,
                                         last + 16 * (rows_granules(format.slot_bytes()) + 1));
  }
  params.memory = rows_memory(rows_sizes(format, plan.rows, wide_table), kRowsSharedBase, warps);
  if (plan.pages) {
    const ChunkLayout layout = chunk_layout(call.cache);
    params.pages = pages;
    params.pages_memory = rows_pages_memory(
        rows_sizes(format, plan.rows, true), rows_state_bytes(format.head_dim, plan.rows),
        kRowsSharedBase, call.cache.num_kv_heads, pages.lanes, pages.stages, pages.chunk_bytes);
    params.chunk_copies = layout.copies;
    params.chunk_head_stride = static_cast<uint32_t>(layout.head_stride);
    params.bulk_pages = pages_within(call.cache, params.pool_end,
                                     (layout.copies - 1) * call.cache.stride_head +
                                         call.cache.block_size * call.cache.stride_token);
  }
  if (plan.verify_heads > 0) {
    params.verify = verify;
    params.verify_memory = rows_verify_memory(format, plan.rows, kRowsSharedBase, verify);
    const int64_t last = call.cache.slot_offset(0, call.cache.block_size - 1,
                                                call.cache.num_kv_heads - verify.heads);
    params.wide_pages = pages_within(call.cache, params.pool_end, last + verify.copy_bytes);
    params.bulk_pages =
        pages_within(call.cache, params.pool_end, (last + verify.row_bytes + 15) / 16 * 16);
  }
  params.whole_groups = call.cache.block_size % kRowsGroupTokens == 0 &&
                        call.cache.stride_token < (int64_t{1} << 26) &&
                        call.cache.stride_block < (int64_t{1} << 32);
  params.page_stride = static_cast<uint32_t>(call.cache.stride_block);
  const int step = warps * kRowsGroupTokens;
  params.step_pages = static_cast<uint32_t>(step / call.cache.block_size);
  params.step_tokens = static_cast<uint32_t>(step % call.cache.block_size);
  if (call.softcap > 0.0f) {
    constexpr float kLog2e = 1.4426950408889634f;
    params.cap = call.softcap * kLog2e;
    params.cap_factor = 2.0f * kLog2e / params.cap;
  }
  params.norm_correction = format.norm_correction;
  if (format.rotated()) {
    const CodebookFactor factor = codebook_factor(format.key, format.head_dim);
    const Codebook book = make_codebook(format.key, format.head_dim);
    for (int i = 0; i < 16; ++i) {
      const uint32_t half = float_to_half_bits(book.levels[i] * factor.factor);
      params.levels[i / 2] |= half << (16 * (i % 2));
    }
    params.key_gain = 1.0f / factor.gain;
  }
  return params;
}

template <KeyCode kKey, ValueCode kValue>
cudaError_t launch_for_head_dim(const RowsParams& params, int head_dim,
                                const RowsResidency& residency, int64_t blocks,
                                cudaStream_t stream) {
  switch (head_dim) {
    case 64:
      return launch_rows<kKey, kValue, 64>(params, residency, blocks, stream);
    case 128:
      return launch_rows<kKey, kValue, 128>(params, residency, blocks, stream);
    default:
      return launch_rows<kKey, kValue, 256>(params, residency, blocks, stream);
  }
}

cudaError_t launch_for_format(const RowsParams& params, const SlotFormat& format,
                              const RowsResidency& residency, int64_t blocks, cudaStream_t stream) {
  const int d = format.head_dim;
  if (format.key == KeyCode::kFp8E4M3) {
    return launch_for_head_dim<KeyCode::kFp8E4M3, ValueCode::kUniform4>(params, d, residency,
                                                                        blocks, stream);
  }
  if (format.key == KeyCode::kFp8E4B15) {
    return launch_for_head_dim<KeyCode::kFp8E4B15, ValueCode::kUniform4>(params, d, residency,
                                                                         blocks, stream);
  }
  if (format.key == KeyCode::kLloydMax4) {
    return launch_for_head_dim<KeyCode::kLloydMax4, ValueCode::kUniform4>(params, d, residency,
                                                                          blocks, stream);
  }
  return format.value == ValueCode::kUniform4
             ? launch_for_head_dim<KeyCode::kLloydMax3, ValueCode::kUniform4>(params, d, residency,
                                                                              blocks, stream)
             : launch_for_head_dim<KeyCode::kLloydMax3, ValueCode::kUniform3>(params, d, residency,
                                                                              blocks, stream);
}

}  // namespace

Status cuda_rows_workspace_bytes(const AttentionCall& call, const DeviceInfo& device,
                                 size_t* bytes) {
  KVTILE_RETURN_IF_ERROR(cuda_rows_supports(call, device));
  const RowsShape shape = rows_shape(call, device);
  *bytes = rows_workspace_bytes(shape, device.num_sms);
  return {};
}

Status cuda_rows_run(const AttentionCall& call, Workspace workspace, const DeviceInfo& device,
                     cudaStream_t stream) {
  size_t needed = 0;
  KVTILE_RETURN_IF_ERROR(cuda_rows_workspace_bytes(call, device, &needed));
  if (workspace.bytes < needed) {
    return Status(StatusCode::kWorkspaceTooSmall,
                  fmt::format("workspace: got {} bytes, wanted {}", workspace.bytes, needed));
  }
  if (call.total_q == 0) return {};
  const RowsShape shape = rows_shape(call, device);
  RowsResidency residency = residency_of(call, shape, device);
  const RowsPlan plan = make_rows_plan(shape, device.num_sms);
  const RowsPages pages = pages_of(call, device);
  if (plan.pages) residency = {pages.warps, pages.shared_bytes};
  RowsVerify verify;
  if (plan.verify_heads > 0) {
    verify = verify_of(call, device, plan.rows);
    residency = {verify.warps, verify.shared_bytes};
  }
  const int64_t tile_blocks = int64_t{plan.num_subtiles} * plan.num_states() *
                              (shape.num_kv_heads / plan.block_heads(shape.num_kv_heads));
  RowsParams params =
      make_rows_params(call, plan, pages, verify, residency.warps, rows_wide_table(device.arch),
                       workspace, plan.launch_states(shape.num_kv_heads));
  params.early_launch = device.arch >= 90;
  do {
    const int64_t tiles = std::min(plan.launch_tiles, plan.num_tiles - params.first_tile);
    params.num_rows = tiles < plan.num_tiles ? tiles : call.total_q;
    if (tiles > 0) {
      KVTILE_RETURN_IF_ERROR(cuda_status(
          "rows kernel",
          launch_for_format(params, call.cache.format, residency, tiles * tile_blocks, stream)));
    }
    KVTILE_RETURN_IF_ERROR(cuda_status(
        "rows combine", launch_rows_combine(params, call.cache.format.head_dim, stream)));
    params.first_tile += tiles;
  } while (params.first_tile < plan.num_tiles);
  return {};
}

}  // namespace kvtile::cuda

#endif  // KVTILE_CUDA
