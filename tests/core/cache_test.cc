// Page addressing: 64-bit offsets, overlap and extent checks.
#include "kvtile/cache.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::fails_with;
using testing::is_ok;
using testing::make_format;
using testing::some_pages;

TEST(PagedCache, DenseOrders) {
  const SlotFormat format = make_format("4bit_nc", 128);
  const PagedCache token_major = make_cache(some_pages(), 10, 16, 8, format);
  EXPECT_EQ(token_major.stride_head, 134);
  EXPECT_EQ(token_major.stride_token, 134 * 8);
  EXPECT_EQ(token_major.stride_block, 134 * 8 * 16);
  EXPECT_EQ(token_major.pages_bytes, 134 * 8 * 16 * 10);
  EXPECT_EQ(cache_extent_bytes(token_major), token_major.pages_bytes);
  const PagedCache head_major = make_cache(some_pages(), 10, 16, 8, format, PageLayout::kHeadMajor);
  EXPECT_EQ(head_major.stride_token, 134);
  EXPECT_EQ(head_major.stride_head, 134 * 16);
  EXPECT_EQ(head_major.slot_offset(3, 5, 7), 3 * 134 * 8 * 16 + 5 * 134 + 7 * 134 * 16);
  const PagedCache padded =
      make_cache(some_pages(), 10, 16, 8, format, PageLayout::kTokenMajor, 256);
  EXPECT_EQ(padded.stride_head, 256);
  EXPECT_EQ(cache_extent_bytes(padded), 256 * 8 * 16 * 10 - (256 - 134));
  for (const PagedCache& cache : {token_major, head_major, padded}) {
    EXPECT_TRUE(is_ok(check_cache(cache)));
  }
}

TEST(PagedCache, OffsetsAre64Bit) {
  const PagedCache cache = make_cache(some_pages(), 700000, 784, 4, make_format("k8v4", 256));
  const int64_t offset = cache.slot_offset(699999, 783, 3);
  EXPECT_EQ(offset, int64_t{388} * 4 * 784 * 700000 - 388);
  EXPECT_GT(offset, int64_t{1} << 39);
  EXPECT_TRUE(is_ok(check_cache(cache)));
}

TEST(PagedCache, RefusesEachBadFieldByName) {
  const PagedCache good = make_cache(some_pages(), 4, 16, 2, make_format("3bit_nc", 64));
  const auto refused = [&good](const char* name, auto change) {
    PagedCache cache = good;
    change(&cache);
    EXPECT_TRUE(fails_with(check_cache(cache), StatusCode::kInvalidArgument, name));
  };
  refused("block_size", [](PagedCache* c) { c->block_size = 0; });
  refused("block_size", [](PagedCache* c) { c->block_size = -16; });
  refused("num_kv_heads", [](PagedCache* c) { c->num_kv_heads = 0; });
  refused("num_blocks", [](PagedCache* c) { c->num_blocks = -1; });
  refused("pages", [](PagedCache* c) { c->pages = nullptr; });
  refused("layout", [](PagedCache* c) { c->layout = static_cast<PageLayout>(9); });
  refused("stride_head", [](PagedCache* c) { c->stride_head = 53; });
  refused("stride_head", [](PagedCache* c) { c->stride_head = -54; });
  refused("stride_head", [](PagedCache* c) { c->stride_head = 0; });
  refused("stride_token", [](PagedCache* c) { c->stride_token = 107; });
  refused("stride_block", [](PagedCache* c) { c->stride_block = 16 * 108 - 1; });
  refused("stride_block",
          [](PagedCache* c) { c->stride_block = std::numeric_limits<int64_t>::max() / 2; });
  refused("pages_bytes", [](PagedCache* c) { c->pages_bytes -= 1; });
  PagedCache format = good;
  format.format.head_dim = 96;
  EXPECT_TRUE(fails_with(check_cache(format), StatusCode::kUnsupported, "head_dim"));
}

TEST(PagedCache, StridesOfSizeOneDimensionsAreIgnored) {
  PagedCache cache = make_cache(some_pages(), 1, 1, 1, make_format("4bit_nc", 64));
  cache.stride_block = -5;
  cache.stride_token = 0;
  cache.stride_head = 7;
  EXPECT_TRUE(is_ok(check_cache(cache)));
  EXPECT_EQ(cache_extent_bytes(cache), 70);
}

TEST(PagedCache, InterleavedPoolsAreLegal) {
  // Two layers interleaved block by block: the block stride doubles, the rest stays dense.
  PagedCache cache = make_cache(some_pages(), 8, 16, 4, make_format("k3v4_nc", 128));
  cache.stride_block *= 2;
  cache.pages_bytes = cache_extent_bytes(cache);
  EXPECT_TRUE(is_ok(check_cache(cache)));
  // Heads outermost, as a strided view of anything may be.
  cache.stride_token = 118;
  cache.stride_block = 118 * 16;
  cache.stride_head = 118 * 16 * 8;
  cache.layout = PageLayout::kStrided;
  cache.pages_bytes = 0;
  EXPECT_TRUE(is_ok(check_cache(cache)));
}

TEST(PagedCache, EmptyPoolNeedsNoMemory) {
  PagedCache cache = make_cache(nullptr, 0, 16, 2, make_format("4bit_nc", 64));
  EXPECT_TRUE(is_ok(check_cache(cache)));
  EXPECT_EQ(cache_extent_bytes(cache), 0);
}

}  // namespace
}  // namespace kvtile
