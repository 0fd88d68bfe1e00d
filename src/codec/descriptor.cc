// The one-line descriptor of a cache: how its bytes are to be read, the frozen codebook included.
#include <algorithm>
#include <cstring>
#include <string>

#include "kvtile/cache.h"
#include "src/codec/codebook.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

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

}  // namespace

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
