// Address arithmetic of the kernels, on the host: division by multiplication, slots and hostile
// indices, the tile image, bucket cells, and the check of compiled resources.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>

#include "src/attention/cuda/image.h"
#include "src/attention/cuda/params.h"
#include "src/codec/buckets.h"
#include "src/core/cache_params.h"
#include "tests/testing/generate.h"

namespace kvtile::cuda {
namespace {

TEST(FastDivisor, MatchesDivision) {
  constexpr uint64_t kEnd = uint64_t{1} << 31;
  for (uint32_t divisor : {1u, 2u, 3u, 5u, 7u, 16u, 100u, 784u, 1000u, 65535u, 65537u, 1u << 30,
                           2147483646u, 2147483647u}) {
    const FastDivisor fast(divisor);
    for (uint64_t n = 0; n < kEnd; n += 104729) {
      ASSERT_EQ(fast.divide(static_cast<uint32_t>(n)), n / divisor) << n << " / " << divisor;
    }
    // Around multiples, where a wrong multiplier shows.
    for (uint64_t multiple = divisor; multiple < kEnd;
         multiple += divisor * (1 + kEnd / 9973 / divisor)) {
      for (uint64_t n = multiple - 1; n <= multiple && n < kEnd; ++n) {
        ASSERT_EQ(fast.divide(static_cast<uint32_t>(n)), n / divisor) << n << " / " << divisor;
      }
    }
    ASSERT_EQ(fast.divide(2147483647u), 2147483647u / divisor);
  }
}

TEST(CacheParams, SlotsOfBothAddressings) {
  std::byte base{};
  for (int block_size : {1, 16, 784}) {
    const SlotFormat format = testing::make_format("4bit_nc", 128);
    const PagedCache cache = make_cache(&base, 1000, block_size, 8, format, PageLayout::kHeadMajor);
    const CacheParams params = make_cache_params(cache);
    const int32_t table[] = {999, 0, 7};
    for (int64_t token : {0, 1, block_size - 1, block_size, 3 * block_size - 1}) {
      const int64_t block = table[token / block_size];
      const int64_t offset = cache.slot_offset(block, token % block_size, 5);
      EXPECT_EQ(params.slot_in_table(table, 3, token, 5), &base + offset);
      EXPECT_EQ(params.slot_at(block * block_size + token % block_size, 5), &base + offset);
    }
  }
}

TEST(CacheParams, HostileIndicesAreNull) {
  std::byte base{};
  const SlotFormat format = testing::make_format("4bit_nc", 128);
  const CacheParams params = make_cache_params(make_cache(&base, 10, 16, 2, format));
  const int32_t table[] = {0, -1, 10, std::numeric_limits<int32_t>::max(),
                           std::numeric_limits<int32_t>::min()};
  EXPECT_NE(params.slot_in_table(table, 5, 15, 0), nullptr);
  for (int64_t token : {int64_t{16}, int64_t{32}, int64_t{48}, int64_t{64}, int64_t{80},
                        int64_t{-1}, int64_t{1} << 31, int64_t{1} << 62}) {
    EXPECT_EQ(params.slot_in_table(table, 5, token, 0), nullptr) << token;
  }
  EXPECT_NE(params.slot_at(159, 0), nullptr);
  for (int64_t entry : {int64_t{160}, int64_t{-1}, int64_t{1} << 31, int64_t{1} << 62,
                        std::numeric_limits<int64_t>::min()}) {
    EXPECT_EQ(params.slot_at(entry, 0), nullptr) << entry;
  }
}

TEST(CacheParams, PoolsBeyondFourGigabytes) {
  std::byte base{};
  const SlotFormat format = testing::make_format("4bit_nc", 128);
  const PagedCache cache = make_cache(&base, int64_t{1} << 28, 16, 8, format);
  const CacheParams params = make_cache_params(cache);
  const int64_t block = (int64_t{1} << 28) - 1;
  EXPECT_EQ(params.slot_at(block * 16 + 3, 7), &base + cache.slot_offset(block, 3, 7));
}

TEST(Image, ChunksOfAHeadAreDisjointAndContiguous) {
  for (int tokens : {64, 128, 192}) {
    for (int head_dim : {64, 128, 256}) {
      std::set<int> offsets;
      for (int chunk = 0; chunk < head_dim / kChunkDims; ++chunk) {
        for (int token = 0; token < tokens; ++token) {
          offsets.insert(chunk_offset(chunk, token, tokens));
        }
      }
      EXPECT_EQ(static_cast<int>(offsets.size()) * kChunkBytes, plane_bytes(tokens, head_dim));
      EXPECT_EQ(*offsets.rbegin() + kChunkBytes, plane_bytes(tokens, head_dim));
      EXPECT_EQ(image_bytes(tokens + 1, tokens, head_dim), 2 * subtile_bytes(tokens, head_dim));
    }
  }
}

TEST(AttentionParams, DefaultsAreResolved) {
  AttentionCall call;
  call.num_heads = 8;
  call.total_q = 5;
  call.max_blocks = 9;
  call.cache.format = testing::make_format("k8v4", 128);
  call.cache.num_kv_heads = 2;
  call.cache.block_size = 784;
  const AttentionParams params = make_attention_params(call);
  EXPECT_EQ(params.group, 4);
  EXPECT_EQ(params.query_stride_token, 8 * 128);
  EXPECT_EQ(params.query_stride_head, 128);
  EXPECT_EQ(params.chunk_value_stride_token, 2 * 128);
  EXPECT_EQ(params.lse_stride_head, 5);
  EXPECT_EQ(params.lse_stride_token, 1);
  EXPECT_EQ(params.block_table_stride, 9);
  EXPECT_EQ(params.cache.block_divisor.divide(784 * 3 + 1), 3u);
}

// Codes by cells against counting bounds, at every bound, its neighbours and across the range.
TEST(Buckets, CellsCountBounds) {
  for (KeyCode key : {KeyCode::kLloydMax4, KeyCode::kLloydMax3}) {
    for (int head_dim : {64, 128, 256}) {
      const Codebook book = make_codebook(key, head_dim);
      const float slope = cell_slope(head_dim);
      const CellTable table = make_cell_table(book, slope);
      const auto check = [&](float y) {
        uint32_t expected = 0;
        for (int b = 0; b < book.num_levels - 1; ++b) expected += book.bounds[b] <= y ? 1 : 0;
        const Cell& cell = table.cells[cell_index(y, slope)];
        ASSERT_EQ(cell.code + (y >= cell.bound ? 1 : 0), expected) << y;
      };
      std::set<uint32_t> used;
      for (int b = 0; b < book.num_levels - 1; ++b) {
        float y = book.bounds[b];
        EXPECT_TRUE(used.insert(cell_index(y, slope)).second) << "two bounds in a cell";
        // Well inside its cell, so that no rounding of the index can part them.
        EXPECT_EQ(cell_index(y - 0.018f / slope / 5.604f, slope), cell_index(y, slope));
        EXPECT_EQ(cell_index(y + 0.018f / slope / 5.604f, slope), cell_index(y, slope));
        check(y);
        check(std::nextafter(y, -HUGE_VALF));
        check(std::nextafter(y, HUGE_VALF));
      }
      for (int i = -200000; i <= 200000; ++i) check(static_cast<float>(i) * 2e-5f / slope / 5.604f);
      for (float y : {-0.0f, 0.0f, 1e-45f, -1e-45f, 1.0f, -1.0f, 3e38f, -3e38f}) check(y);
    }
  }
}

// What the hardware makes of a descriptor: the byte of element (x across k, k).
int operand_offset(uint64_t descriptor, bool transposed, int x, int k) {
  const auto field = [descriptor](int bit) {
    return static_cast<int>(descriptor >> bit & 0x3fff) * 16;
  };
  const int core = field(0) + k / 8 * field(16) + x / 8 * field(32);
  return transposed ? core + k % 8 * 16 + x % 8 * 2 : core + x % 8 * 16 + k % 8 * 2;
}

TEST(TileImage, PlanesAreWgmmaOperands) {
  for (int tokens : {64, 128}) {
    for (int head_dim : {64, 128, 256}) {
      const int plane = 0x2c400;
      const uint64_t keys = ptx::matrix_descriptor(plane, key_operand(tokens));
      const uint64_t values = ptx::matrix_descriptor(plane, value_operand(tokens));
      EXPECT_EQ(keys >> 62, 0u);  // no swizzle
      EXPECT_EQ(values >> 62, 0u);
      for (int token = 0; token < tokens; ++token) {
        for (int d = 0; d < head_dim; ++d) {
          const int offset = plane + chunk_offset(d / 8, token, tokens) + d % 8 * 2;
          const uint64_t key_step = ptx::advance(keys, chunk_offset(d / 16 * 2, 0, tokens));
          const uint64_t value_step =
              ptx::advance(values, chunk_offset(0, token / 16 * 16, tokens));
          ASSERT_EQ(operand_offset(key_step, false, token, d % 16), offset) << token << " " << d;
          ASSERT_EQ(operand_offset(value_step, true, d, token % 16), offset) << token << " " << d;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtile::cuda
