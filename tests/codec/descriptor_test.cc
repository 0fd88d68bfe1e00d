// Descriptors tell apart every pair of caches that would be read differently.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvtile/cache.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::fails_with;
using testing::make_format;
using testing::some_pages;

TEST(Descriptor, MatchesItselfAndNothingElse) {
  // Several of these agree in every byte count and differ in meaning only.
  std::vector<PagedCache> caches;
  const auto add = [&caches](const SlotFormat& format, int block, int heads, PageLayout layout,
                             int stride) {
    caches.push_back(make_cache(some_pages(), 8, block, heads, format, layout, stride));
  };
  const SlotFormat four = make_format("4bit_nc", 64);
  add(four, 16, 2, PageLayout::kTokenMajor, 0);
  add(four, 16, 2, PageLayout::kHeadMajor, 0);
  add(four, 32, 2, PageLayout::kTokenMajor, 0);
  add(four, 32, 1, PageLayout::kTokenMajor, 0);
  add(four, 16, 2, PageLayout::kTokenMajor, 128);
  add(make_format("k3v4_nc", 64), 16, 2, PageLayout::kTokenMajor, 128);
  add(make_format("3bit_nc", 64), 16, 2, PageLayout::kTokenMajor, 128);
  add(make_format("k8v4", 64), 16, 2, PageLayout::kTokenMajor, 128);
  add(make_format("k8v4", 64, KeyCode::kFp8E4B15), 16, 2, PageLayout::kTokenMajor, 128);
  SlotFormat uncorrected = four;
  uncorrected.norm_correction = false;
  add(uncorrected, 16, 2, PageLayout::kTokenMajor, 0);
  for (size_t i = 0; i < caches.size(); ++i) {
    for (size_t j = 0; j < caches.size(); ++j) {
      const Status status = match_descriptor(caches[i], cache_descriptor(caches[j]));
      EXPECT_EQ(status.ok(), i == j) << cache_descriptor(caches[i]) << "\n"
                                     << cache_descriptor(caches[j]);
    }
  }
}

TEST(Descriptor, NamesExpectedAndFound) {
  const PagedCache cache = make_cache(some_pages(), 8, 16, 2, make_format("4bit_nc", 64));
  const PagedCache other = make_cache(some_pages(), 8, 16, 2, make_format("4bit_nc", 128));
  const Status status = match_descriptor(cache, cache_descriptor(other));
  EXPECT_TRUE(fails_with(status, StatusCode::kInvalidArgument, "head_dim=64"));
  EXPECT_TRUE(fails_with(status, StatusCode::kInvalidArgument, "head_dim=128"));
}

TEST(Descriptor, CorruptTextIsRefused) {
  const PagedCache cache = make_cache(some_pages(), 8, 16, 2, make_format("4bit_nc", 64));
  const std::string good = cache_descriptor(cache);
  EXPECT_EQ(good.find('\n'), std::string::npos);
  for (size_t cut = 0; cut < good.size(); ++cut) {
    EXPECT_FALSE(match_descriptor(cache, good.substr(0, cut)).ok()) << cut;
    std::string flipped = good;
    flipped[cut] = static_cast<char>(flipped[cut] ^ 1);
    EXPECT_FALSE(match_descriptor(cache, flipped).ok()) << cut;
  }
  EXPECT_FALSE(match_descriptor(cache, good + " extra=1").ok());
  EXPECT_FALSE(match_descriptor(cache, good + good).ok());
}

TEST(Descriptor, CodebookHashSeparatesEveryFormat) {
  std::vector<uint64_t> hashes;
  for (const char* preset : {"4bit_nc", "3bit_nc"}) {
    for (int head_dim : {32, 64, 128, 256, 512}) {
      hashes.push_back(codebook_hash(make_format(preset, head_dim)));
    }
  }
  hashes.push_back(codebook_hash(make_format("k8v4", 64)));
  hashes.push_back(codebook_hash(make_format("k8v4", 64, KeyCode::kFp8E4B15)));
  for (size_t i = 0; i < hashes.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(hashes[i], hashes[j]);
  }
}

}  // namespace
}  // namespace kvtile
