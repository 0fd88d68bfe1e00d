// What a kernel reads of a PagedCache: plain data passed by value, 64-bit strides. The one place
// where device code turns slots and table entries into addresses; a hostile index becomes null,
// never a wild pointer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvtile/cache.h"
#include "kvtile/status.h"
#include "src/core/hd.h"

namespace kvtile::cuda {

// n / divisor for 0 <= n < 2^31 by one multiply.
struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 1u << 31;
  uint32_t shift = 31;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d) {
    uint32_t log = 0;
    while ((uint64_t{1} << log) < d) ++log;
    shift = 31 + log;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d);
  }
  KVTILE_HD uint32_t divide(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> shift);
  }
};

struct CacheParams {
  std::byte* pages = nullptr;
  int64_t num_blocks = 0;
  int64_t stride_block = 0, stride_token = 0, stride_head = 0;  // bytes
  int block_size = 1;
  int num_kv_heads = 1;
  FastDivisor block_divisor;

  KVTILE_HD std::byte* slot(int64_t block, int64_t token, int64_t head) const {
    return pages + (block * stride_block + token * stride_token + head * stride_head);
  }

  // The slot of `token` counted from the first token of a block table row, or null where the row
  // does not name a page of the pool. A visible token without a page makes its readers NaN.
  KVTILE_HD std::byte* slot_in_table(const int32_t* table_row, int64_t max_blocks, int64_t token,
                                     int head) const {
    const int64_t index = table_index(max_blocks, token);
    return index < 0 ? nullptr : slot_on_page(table_row[index], index, token, head);
  }

  // The two halves of slot_in_table(), for who reads the table ahead: the entry of a token
  // (negative outside the row), and its slot on the page that the entry names.
  KVTILE_HD int64_t table_index(int64_t max_blocks, int64_t token) const {
    if (token < 0 || token >= (int64_t{1} << 31)) return -1;
    const uint32_t index = block_divisor.divide(static_cast<uint32_t>(token));
    return index < max_blocks ? static_cast<int64_t>(index) : -1;
  }
  KVTILE_HD std::byte* slot_on_page(int64_t block, int64_t index, int64_t token, int head) const {
    if (block < 0 || block >= num_blocks) return nullptr;
    return slot(block, token - index * block_size, head);
  }

  // The slot of a slot_mapping entry (block * block_size + offset), or null outside the pool.
  KVTILE_HD std::byte* slot_at(int64_t entry, int head) const {
    if (entry < 0 || entry >= num_blocks * block_size) return nullptr;
    const int64_t block = entry < (int64_t{1} << 31)
                              ? block_divisor.divide(static_cast<uint32_t>(entry))
                              : entry / block_size;
    return slot(block, entry - block * block_size, head);
  }
};

// Kernels read slots by 2-byte words: kUnsupported for an odd address or stride. `backend` goes
// into the message.
Status check_word_cache(const PagedCache& cache, std::string_view backend);

inline CacheParams make_cache_params(const PagedCache& cache) {
  CacheParams params;
  params.pages = cache.pages;
  params.num_blocks = cache.num_blocks;
  params.stride_block = cache.stride_block;
  params.stride_token = cache.stride_token;
  params.stride_head = cache.stride_head;
  params.block_size = cache.block_size;
  params.num_kv_heads = cache.num_kv_heads;
  params.block_divisor = FastDivisor(static_cast<uint32_t>(cache.block_size));
  return params;
}

}  // namespace kvtile::cuda
