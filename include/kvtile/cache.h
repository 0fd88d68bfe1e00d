// PagedCache: a pool of pages holding slots, addressed by (block, token, head) through byte
// strides. It owns no memory. A descriptor must match the bytes it describes: see check_cache().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kvtile/slot.h"
#include "kvtile/status.h"

namespace kvtile {

// Page order. Both are plain strides underneath; the id travels with a cache so that a reader can
// refuse what it was not written as. kStrided: arbitrary non-overlapping strides.
enum class PageLayout : uint8_t { kTokenMajor = 0, kHeadMajor = 1, kStrided = 2 };
inline constexpr int kLayoutVersion = 1;

struct PagedCache {
  std::byte* pages = nullptr;  // attend() and decode_slots() only read
  int64_t pages_bytes = 0;     // size of the pool; 0 = not stated, then extents are not checked
  int64_t num_blocks = 0;
  int block_size = 0;  // tokens of one block, any value >= 1
  int num_kv_heads = 0;
  int64_t stride_block = 0;  // bytes; may include page padding, which is never read
  int64_t stride_token = 0;  // bytes; may exceed slot_bytes (padded slots)
  int64_t stride_head = 0;   // bytes
  PageLayout layout = PageLayout::kTokenMajor;
  SlotFormat format;

  // The one owner of a slot's address. 64-bit throughout: a pool can exceed 2^31 bytes.
  int64_t slot_offset(int64_t block, int64_t token, int64_t head) const {
    return block * stride_block + token * stride_token + head * stride_head;
  }
};

// A densely packed cache over `pages`: [block, token, head, slot] or [block, head, token, slot].
// `slot_stride_bytes` 0 means format.slot_bytes(); larger pads every slot.
PagedCache make_cache(std::byte* pages, int64_t num_blocks, int block_size, int num_kv_heads,
                      const SlotFormat& format, PageLayout layout = PageLayout::kTokenMajor,
                      int slot_stride_bytes = 0);

// Bytes from the first byte of the pool to the last byte a slot can touch.
int64_t cache_extent_bytes(const PagedCache& cache);

// Format, strides (no two slots overlap; strides of size-one dimensions are ignored) and extent
// against pages_bytes. kInvalidArgument naming the field.
Status check_cache(const PagedCache& cache);

// FNV-1a over the frozen codebook and decision bounds the format decodes with.
uint64_t codebook_hash(const SlotFormat& format);

// One line that identifies how bytes are to be read: layout id and version, preset, head_dim,
// num_kv_heads, block_size, slot stride, FP8 flavour, codebook hash. Store it beside a dumped
// cache.
std::string cache_descriptor(const PagedCache& cache);
// kInvalidArgument with the first differing field, expected and found.
Status match_descriptor(const PagedCache& cache, const std::string& descriptor);

}  // namespace kvtile
