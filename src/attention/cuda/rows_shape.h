// How a call looks to the plan of the rows engine: its shape, and whether blocks of all KV heads
// can copy its pages. Host arithmetic over the call and a device's description; nothing is asked of
// a driver.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvtile/attention.h"
#include "src/attention/cuda/rows_plan.h"
#include "src/core/device.h"

namespace kvtile::cuda {

// Whether the heads of 16 tokens lie together, side by side in each token or one after the other,
// and where a bulk copy can reach them; the layout of such a copy.
struct ChunkLayout {
  int copies = 0;  // 0: they do not
  int64_t bytes = 0, head_stride = 0;
};
inline ChunkLayout chunk_layout(const PagedCache& cache) {
  const int64_t heads = cache.num_kv_heads, slot = cache.format.slot_bytes();
  const int64_t alignment = rows_slot_alignment(cache.format.key);
  const auto multiple = [](int64_t x, int64_t of) { return x % of == 0; };
  if (cache.block_size % kRowsGroupTokens != 0 || cache.stride_token < slot ||
      cache.stride_block >= (int64_t{1} << 32) ||
      (reinterpret_cast<uintptr_t>(cache.pages) & 15) != 0 || !multiple(cache.stride_block, 16) ||
      !multiple(cache.stride_token, alignment) || !multiple(cache.stride_head, alignment)) {
    return {};
  }
  const int64_t of_head = kRowsGroupTokens * cache.stride_token;
  if (cache.stride_head * (heads - 1) + slot <= cache.stride_token) {
    return {1, of_head, cache.stride_head};
  }
  if (of_head > cache.stride_head || !multiple(cache.stride_head, 16)) return {};
  return {cache.num_kv_heads, heads * of_head, of_head};
}

inline RowsPages pages_of(const AttentionCall& call, const DeviceInfo& device) {
  const ChunkLayout layout = chunk_layout(call.cache);
  if (layout.copies == 0) return {};
  return rows_pages(call.cache.format, call.cache.num_kv_heads, layout.bytes,
                    device.shared_bytes_per_block, rows_wide_table(device.arch));
}

// Whether warpgroups can take the call's pages, with a capacity of so many rows: whole groups of 16
// tokens in a page, rows at the same distance from a 16-byte boundary in each of them.
inline RowsVerify verify_of(const AttentionCall& call, const DeviceInfo& device, int rows) {
  const PagedCache& cache = call.cache;
  const SlotFormat& format = cache.format;
  const int64_t slot = format.slot_bytes(), alignment = rows_slot_alignment(format.key);
  if (device.arch != 90 || (format.head_dim != 128 && format.head_dim != 256) ||
      cache.block_size % kRowsGroupTokens != 0 || cache.stride_token < slot ||
      cache.stride_token >= (int64_t{1} << 26) || cache.stride_block >= (int64_t{1} << 32) ||
      (reinterpret_cast<uintptr_t>(cache.pages) & 15) != 0 || cache.stride_block % 16 != 0 ||
      cache.stride_token % alignment != 0 || cache.stride_head % alignment != 0) {
    return {};
  }
  int heads = 1;
  const bool side_by_side =
      cache.stride_head * (cache.num_kv_heads - 1) + slot <= cache.stride_token;
  if (side_by_side && format.head_dim == 128) {
    heads = cache.num_kv_heads % 4 == 0 ? 4 : cache.num_kv_heads % 2 == 0 ? 2 : 1;
  }
  const int64_t row_bytes = (heads - 1) * cache.stride_head + slot;
  int64_t reach = 0;
  for (int64_t head = 0; head < cache.num_kv_heads; head += heads) {
    for (int64_t token = 0; token < kRowsGroupTokens; ++token) {
      const int64_t phase = (head * cache.stride_head + token * cache.stride_token) & 15;
      reach = std::max(reach, phase + row_bytes);
    }
  }
  if (reach > 4096) return {};
  return rows_verify(format, rows, heads, static_cast<int>(row_bytes),
                     static_cast<int>((reach + 15) / 16), device.shared_bytes_per_block);
}

inline RowsShape rows_shape(const AttentionCall& call, const DeviceInfo& device) {
  RowsShape shape;
  shape.num_seqs = call.num_seqs;
  shape.total_q = call.total_q;
  shape.max_q_len = call.max_q_len;
  shape.num_kv_heads = call.cache.num_kv_heads;
  shape.group = call.num_heads / call.cache.num_kv_heads;
  shape.head_dim = call.cache.format.head_dim;
  shape.max_rows = rows_max_capacity(call.cache.format, device.shared_bytes_per_block,
                                     rows_wide_table(device.arch));
  shape.raw_chunk = call.chunk_key != nullptr;
  shape.pages = pages_of(call, device).warps > 0;
  shape.batch_invariant = call.batch_invariant;
  // What holds 32 rows holds 16.
  shape.verify_heads = verify_of(call, device, kRowsMaxRows).heads;
  return shape;
}

}  // namespace kvtile::cuda
