// A million cached tokens: error bounded by the same constant as at four thousand, counting exact,
// needles found, workspace unchanged.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "src/attention/reference.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::format_names;
using testing::FormatName;
using testing::is_ok;

constexpr int64_t kMillion = 1 << 20;

AttendSpec long_spec(const FormatName& name, int64_t cached, int64_t rows) {
  AttendSpec spec;
  spec.preset = name.preset;
  spec.fp8 = name.fp8;
  spec.head_dim = 32;
  spec.num_kv_heads = 1;
  spec.group = 2;
  spec.seqs = {{cached, rows}};
  return spec;
}

TEST(LongContext, CountingAMillionKeysIsExact) {
  for (const FormatName& name : format_names()) {
    for (bool raw : {false, true}) {
      AttendSpec spec = long_spec(name, kMillion - 2, 2);
      spec.raw_chunk = raw;
      AttendProblem problem(spec);
      testing::SlotContent content;
      content.key_codes.assign(32, 0);
      content.value_codes.assign(32, 0);
      content.zero = testing::double_to_half(5.0);
      for (int64_t p = 0; p < problem.packed_end(0); ++p) {
        write_slot(problem.call.cache.format, content, problem.slot(0, p, 0));
      }
      if (raw) {
        for (int64_t r = 0; r < 2; ++r) {
          for (int d = 0; d < 32; ++d) {
            problem.set_chunk_key(r, 0, d, 0.0);
            problem.set_chunk_value(r, 0, d, 5.0);
          }
        }
      }
      ASSERT_TRUE(is_ok(problem.run()));
      for (int64_t r = 0; r < 2; ++r) {
        for (int h = 0; h < 2; ++h) {
          for (int d = 0; d < 32; ++d) ASSERT_EQ(problem.out(r, h, d), 5.0) << name.preset;
          EXPECT_NEAR(problem.lse(r, h), std::log(static_cast<double>(kMillion - 1 + r)), 2e-6);
        }
      }
    }
  }
}

TEST(LongContext, ErrorIsFlatFromFourThousandToAMillion) {
  for (const FormatName& name : format_names()) {
    double shortest = 0;
    for (int64_t cached : {int64_t{4096}, int64_t{65537}, int64_t{262143}, kMillion + 1009}) {
      AttendProblem problem(long_spec(name, cached, 1));
      ASSERT_TRUE(is_ok(problem.run()));
      double largest = 0;
      std::vector<double> want(32);
      for (int h = 0; h < 2; ++h) {
        double lse = 0;
        reference_attend_row(problem.call, 0, h, want.data(), &lse);
        EXPECT_NEAR(problem.lse(0, h), lse, 1e-5) << name.preset << " " << cached;
        for (int d = 0; d < 32; ++d) {
          largest =
              std::max(largest, std::fabs(problem.out(0, h, d) - want[static_cast<size_t>(d)]));
        }
      }
      // Values reach about 4.5; the bound is 1e-5 of that and the error must not creep with length.
      EXPECT_LE(largest, 4e-5) << name.preset << " " << cached;
      if (cached == 4096) shortest = largest;
      EXPECT_LE(largest, 4 * shortest + 2e-6) << name.preset << " " << cached;
    }
  }
}

TEST(LongContext, NeedlesAtEveryDepthOfAMillion) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec = long_spec(name, kMillion, 1);
    AttendProblem problem(spec);
    const SlotFormat format = spec.format();
    for (int64_t depth : {int64_t{0}, int64_t{32767}, int64_t{32768}, kMillion / 2, kMillion}) {
      std::vector<std::byte> kept(problem.slot(0, depth, 0),
                                  problem.slot(0, depth, 0) + format.slot_bytes());
      // The needle's key is the query's own direction, at the largest norm around.
      testing::SlotContent content;
      std::vector<double> direction(32);
      for (int d = 0; d < 32; ++d) {
        const int sign = d % 3 == 0 ? 1 : 0;
        content.key_codes.push_back(format.rotated()
                                        ? (sign == 1 ? (1 << key_bits(format.key)) - 1 : 0)
                                        : (format.key == KeyCode::kFp8E4M3 ? 0x40 : 0x7e) |
                                              (sign == 1 ? 0 : 0x80));
        content.value_codes.push_back(d % (1 << value_bits(format.value)));
      }
      content.norm = testing::double_to_half(16.0);
      content.scale = 0x3C00;
      write_slot(format, content, problem.slot(0, depth, 0));
      reference_decode_slot(format, problem.slot(0, depth, 0), direction.data(), nullptr);
      if (format.rotated()) reference_hadamard(direction.data(), 32);
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < 32; ++d) {
          problem.set_query(0, h, d, 8 * direction[static_cast<size_t>(d)]);
        }
      }
      ASSERT_TRUE(is_ok(problem.run()));
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < 32; ++d) {
          ASSERT_NEAR(problem.out(0, h, d), content.value_codes[static_cast<size_t>(d)], 2e-4)
              << name.preset << " depth " << depth;
        }
      }
      std::copy(kept.begin(), kept.end(), problem.slot(0, depth, 0));
    }
  }
}

TEST(LongContext, TileSizeDoesNotMatterAtAMillion) {
  for (const FormatName& name : format_names()) {
    AttendProblem problem(long_spec(name, kMillion - 77, 2));
    testing::RowBits want, got;
    ASSERT_TRUE(is_ok(testing::run_rows(problem.call, {}, &want)));
    for (int64_t tile : {4096, 100000, 1 << 21}) {
      AttentionCall call = problem.call;
      call.tile_tokens = tile;
      ASSERT_TRUE(is_ok(testing::run_rows(call, {}, &got)));
      for (size_t r = 0; r < want.size(); ++r) {
        EXPECT_TRUE(testing::same_bits(got[r], want[r])) << name.preset << " tile " << tile;
      }
    }
  }
}

TEST(LongContext, AWindowOverAMillionTouchesOnlyItsPages) {
  AttendSpec spec = long_spec(format_names()[2], 524288, 40);
  spec.mask.window = 4096;
  AttendProblem problem(spec);  // everything left of the window is poison or a garbage entry
  EXPECT_EQ(problem.packed_begin(0), 524288 - 4095);
  EXPECT_TRUE(testing::runs_and_matches(&problem));
}

}  // namespace
}  // namespace kvtile
