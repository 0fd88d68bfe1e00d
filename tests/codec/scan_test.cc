// scan_slots lists exactly the planted non-finite words.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kvtile/codec.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::fails_with;
using testing::is_ok;
using testing::make_format;

struct Pool {
  Pool(const SlotFormat& format, int num_blocks, int block_size, int heads) {
    cache = make_cache(nullptr, num_blocks, block_size, heads, format, PageLayout::kHeadMajor);
    pages.assign(static_cast<size_t>(cache.pages_bytes), std::byte{0});
    cache.pages = pages.data();
    testing::Random random(3);
    for (int b = 0; b < num_blocks; ++b) {
      for (int t = 0; t < block_size; ++t) {
        for (int h = 0; h < heads; ++h) {
          write_slot(format, testing::random_slot(format, &random), slot(b, t, h));
        }
      }
    }
  }

  std::byte* slot(int64_t b, int t, int h) { return cache.pages + cache.slot_offset(b, t, h); }
  void plant(int64_t b, int t, int h, int offset, uint16_t word) {
    std::memcpy(slot(b, t, h) + offset, &word, 2);
  }

  PagedCache cache;
  std::vector<std::byte> pages;
};

TEST(Scan, CleanPoolIsClean) {
  Pool pool(make_format("4bit_nc", 32), 50, 16, 2);
  std::vector<NonFiniteWord> found;
  int64_t total = -1;
  ASSERT_TRUE(is_ok(scan_slots(pool.cache, 100, &found, &total)));
  EXPECT_EQ(total, 0);
  EXPECT_TRUE(found.empty());
}

TEST(Scan, ListsExactlyThePlantedWordsInOrder) {
  const SlotFormat format = make_format("3bit_nc", 32);
  Pool pool(format, 1000, 16, 2);
  pool.plant(999, 15, 1, format.zero_offset(), 0xFC00);
  pool.plant(0, 3, 1, format.norm_offset(), 0x7E00);
  pool.plant(500, 0, 0, format.scale_offset(), 0x7C00);
  for (int threads : {1, 2, 3}) {
    std::vector<NonFiniteWord> found;
    int64_t total = 0;
    ASSERT_TRUE(is_ok(scan_slots(pool.cache, 100, &found, &total, threads)));
    ASSERT_EQ(total, 3);
    ASSERT_EQ(found.size(), 3u);
    EXPECT_EQ(found[0].block, 0);
    EXPECT_EQ(found[0].token, 3);
    EXPECT_EQ(found[0].head, 1);
    EXPECT_EQ(found[0].field, SlotField::kNorm);
    EXPECT_EQ(found[0].word, 0x7E00);
    EXPECT_EQ(found[1].block, 500);
    EXPECT_EQ(found[1].field, SlotField::kScale);
    EXPECT_EQ(found[1].word, 0x7C00);
    EXPECT_EQ(found[2].block, 999);
    EXPECT_EQ(found[2].token, 15);
    EXPECT_EQ(found[2].head, 1);
    EXPECT_EQ(found[2].field, SlotField::kZero);
    EXPECT_EQ(found[2].word, 0xFC00);
  }
}

TEST(Scan, KeepsAtMostTheAskedNumberAndCountsAll) {
  const SlotFormat format = make_format("4bit_nc", 32);
  Pool pool(format, 40, 16, 1);
  for (int b = 0; b < 40; ++b) pool.plant(b, b % 16, 0, format.norm_offset(), 0xFFFF);
  std::vector<NonFiniteWord> found;
  int64_t total = 0;
  ASSERT_TRUE(is_ok(scan_slots(pool.cache, 7, &found, &total, 2)));
  EXPECT_EQ(total, 40);
  ASSERT_EQ(found.size(), 7u);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(found[static_cast<size_t>(i)].block, i);
}

TEST(Scan, Fp8NanBytesAreFoundOncePerSlotAndOnlyInE4m3) {
  for (KeyCode flavour : {KeyCode::kFp8E4M3, KeyCode::kFp8E4B15}) {
    const SlotFormat format = make_format("k8v4", 64, flavour);
    Pool pool(format, 4, 4, 1);
    pool.slot(2, 1, 0)[10] = std::byte{0x7f};
    pool.slot(2, 1, 0)[40] = std::byte{0xff};
    std::vector<NonFiniteWord> found;
    int64_t total = 0;
    ASSERT_TRUE(is_ok(scan_slots(pool.cache, 10, &found, &total)));
    if (flavour == KeyCode::kFp8E4B15) {
      // Random e4b15 bytes include 0x7f: all finite there.
      EXPECT_EQ(total, 0);
      continue;
    }
    ASSERT_EQ(total, 1);
    EXPECT_EQ(found[0].block, 2);
    EXPECT_EQ(found[0].token, 1);
    EXPECT_EQ(found[0].field, SlotField::kKeyByte);
    EXPECT_EQ(found[0].word, 0x7f);
  }
}

TEST(Scan, EveryNonFiniteWordAndNoFiniteOne) {
  const SlotFormat format = make_format("k3v4_nc", 32);
  Pool pool(format, 65536 / 16, 16, 1);
  int64_t want = 0;
  for (int word = 0; word < 65536; ++word) {
    pool.plant(word / 16, word % 16, 0, format.scale_offset(), static_cast<uint16_t>(word));
    want += (word & 0x7C00) == 0x7C00;
  }
  std::vector<NonFiniteWord> found;
  int64_t total = 0;
  ASSERT_TRUE(is_ok(scan_slots(pool.cache, 65536, &found, &total, 2)));
  EXPECT_EQ(total, want);
  ASSERT_EQ(static_cast<int64_t>(found.size()), want);
  for (const NonFiniteWord& w : found) {
    EXPECT_EQ(w.field, SlotField::kScale);
    EXPECT_EQ(w.word, w.block * 16 + w.token);
  }
}

TEST(Scan, FieldNames) {
  EXPECT_STREQ(slot_field_name(SlotField::kNorm), "norm");
  EXPECT_STREQ(slot_field_name(SlotField::kScale), "scale");
  EXPECT_STREQ(slot_field_name(SlotField::kZero), "zero");
  EXPECT_NE(std::string(slot_field_name(SlotField::kKeyByte)).find("key"), std::string::npos);
}

TEST(Scan, RefusesABadCache) {
  Pool pool(make_format("4bit_nc", 32), 2, 2, 1);
  pool.cache.block_size = 0;
  std::vector<NonFiniteWord> found;
  int64_t total = 0;
  EXPECT_TRUE(fails_with(scan_slots(pool.cache, 1, &found, &total), StatusCode::kInvalidArgument,
                         "block_size"));
}

}  // namespace
}  // namespace kvtile
