// Page addressing: dense constructors, overlap and extent checks.
#include "kvtile/cache.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "src/core/cache_params.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

// Largest byte count any pool may describe; keeps every offset product far from int64 overflow.
constexpr int64_t kMaxPoolBytes = int64_t{1} << 56;

struct Dim {
  const char* name;
  int64_t size, stride;
};

}  // namespace

PagedCache make_cache(std::byte* pages, int64_t num_blocks, int block_size, int num_kv_heads,
                      const SlotFormat& format, PageLayout layout, int slot_stride_bytes) {
  PagedCache cache;
  const int64_t slot = slot_stride_bytes > 0 ? slot_stride_bytes : format.slot_bytes();
  cache.pages = pages;
  cache.num_blocks = num_blocks;
  cache.block_size = block_size;
  cache.num_kv_heads = num_kv_heads;
  cache.layout = layout;
  cache.format = format;
  cache.stride_token = layout == PageLayout::kHeadMajor ? slot : slot * num_kv_heads;
  cache.stride_head = layout == PageLayout::kHeadMajor ? slot * block_size : slot;
  cache.stride_block = slot * num_kv_heads * block_size;
  cache.pages_bytes = cache.stride_block * num_blocks;
  return cache;
}

int64_t cache_extent_bytes(const PagedCache& cache) {
  if (cache.num_blocks == 0) return 0;
  return cache.slot_offset(cache.num_blocks - 1, cache.block_size - 1, cache.num_kv_heads - 1) +
         cache.format.slot_bytes();
}

Status check_cache(const PagedCache& cache) {
  KVTILE_RETURN_IF_ERROR(check_format(cache.format));
  if (static_cast<int>(cache.layout) > static_cast<int>(PageLayout::kStrided)) {
    return invalid("layout", static_cast<int>(cache.layout), "0..2");
  }
  if (cache.block_size < 1) return invalid("block_size", cache.block_size, ">= 1");
  if (cache.num_kv_heads < 1) return invalid("num_kv_heads", cache.num_kv_heads, ">= 1");
  if (cache.num_blocks < 0) return invalid("num_blocks", cache.num_blocks, ">= 0");
  if (cache.num_blocks > 0 && cache.pages == nullptr) {
    return invalid("pages", "null", "a pool of num_blocks pages");
  }

  std::array<Dim, 3> dims = {Dim{"stride_block", cache.num_blocks, cache.stride_block},
                             Dim{"stride_token", cache.block_size, cache.stride_token},
                             Dim{"stride_head", cache.num_kv_heads, cache.stride_head}};
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  // Slots do not overlap when each dimension steps over everything the finer ones span.
  int64_t span = cache.format.slot_bytes();
  for (const Dim& dim : dims) {
    if (dim.size <= 1) continue;
    if (dim.stride < span) {
      return invalid(dim.name, dim.stride, fmt::format(">= {} bytes", span));
    }
    if (dim.stride > kMaxPoolBytes / dim.size) {
      return invalid(dim.name, dim.stride,
                     fmt::format("a pool of at most {} bytes", kMaxPoolBytes));
    }
    span += (dim.size - 1) * dim.stride;
  }
  if (cache.pages_bytes != 0 && cache.num_blocks > 0 && span > cache.pages_bytes) {
    return invalid("pages_bytes", cache.pages_bytes,
                   fmt::format(">= {} for {} blocks of {} tokens x {} heads x {}-byte slots", span,
                               cache.num_blocks, cache.block_size, cache.num_kv_heads,
                               cache.format.slot_bytes()));
  }
  return {};
}

namespace cuda {

Status check_word_cache(const PagedCache& cache, std::string_view backend) {
  const auto odd = [](int64_t x) { return (x & 1) != 0; };
  if (odd(static_cast<int64_t>(reinterpret_cast<uintptr_t>(cache.pages)))) {
    return unsupported("pages", "an odd address",
                       fmt::format("a 2-byte aligned one on backend {}", backend));
  }
  for (auto [name, stride, size] :
       {std::tuple{"stride_block", cache.stride_block, cache.num_blocks},
        std::tuple{"stride_token", cache.stride_token, int64_t{cache.block_size}},
        std::tuple{"stride_head", cache.stride_head, int64_t{cache.num_kv_heads}}}) {
    if (size > 1 && odd(stride)) {
      return unsupported(name, stride,
                         fmt::format("an even number of bytes on backend {}", backend));
    }
  }
  return {};
}

}  // namespace cuda

}  // namespace kvtile
