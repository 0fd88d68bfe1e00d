// Page addressing: dense constructors, overlap and extent checks, and the one-line descriptor.
#include "kvtile/cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <tuple>

#include "src/codec/codebook.h"
#include "src/core/cache_params.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

// Largest byte count any pool may describe; keeps every offset product far from int64 overflow.
constexpr int64_t kMaxPoolBytes = int64_t{1} << 56;

const char* layout_name(PageLayout layout) {
  switch (layout) {
    case PageLayout::kTokenMajor:
      return "token_major";
    case PageLayout::kHeadMajor:
      return "head_major";
    case PageLayout::kStrided:
      return "strided";
  }
  return "unknown";
}

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

uint64_t codebook_hash(const SlotFormat& format) {
  uint64_t hash = 0xcbf29ce484222325ull;
  auto mix = [&hash](const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3ull;
    }
  };
  if (format.rotated()) {
    const Codebook book = make_codebook(format.key, format.head_dim);
    mix(book.levels, sizeof(float) * static_cast<size_t>(book.num_levels));
    mix(book.bounds, sizeof(float) * static_cast<size_t>(book.num_levels - 1));
  } else {
    const char* name = format.key == KeyCode::kFp8E4M3 ? "e4m3" : "e4b15";
    mix(name, std::strlen(name));
  }
  return hash;
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

std::string cache_descriptor(const PagedCache& cache) {
  return fmt::format(
      "kvtile layout={} version={} preset={} norm_correction={} head_dim={} num_kv_heads={} "
      "block_size={} slot_bytes={} stride_block={} stride_token={} stride_head={} codebook={:016x}",
      layout_name(cache.layout), kLayoutVersion, format_name(cache.format),
      cache.format.norm_correction ? 1 : 0, cache.format.head_dim, cache.num_kv_heads,
      cache.block_size, cache.format.slot_bytes(), cache.stride_block, cache.stride_token,
      cache.stride_head, codebook_hash(cache.format));
}

Status match_descriptor(const PagedCache& cache, const std::string& descriptor) {
  const std::string expected = cache_descriptor(cache);
  size_t e = 0, f = 0;
  while (e < expected.size() || f < descriptor.size()) {
    const size_t e_end = std::min(expected.find(' ', e), expected.size());
    const size_t f_end = std::min(descriptor.find(' ', f), descriptor.size());
    const std::string want =
        expected.substr(std::min(e, expected.size()), e_end - std::min(e, e_end));
    const std::string have =
        descriptor.substr(std::min(f, descriptor.size()), f_end - std::min(f, f_end));
    if (want != have) return invalid("cache descriptor", have, want);
    e = e_end + 1;
    f = f_end + 1;
  }
  return {};
}

}  // namespace kvtile
