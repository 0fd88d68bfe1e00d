// Non-finite words and extreme scores: who is hit, who is not, and nothing between.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/testing/cases.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::format_names;
using testing::FormatName;
using testing::is_ok;
using testing::same_bits;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

AttendSpec spec_of(const FormatName& name) {
  AttendSpec spec;
  spec.preset = name.preset;
  spec.fp8 = name.fp8;
  return spec;
}

// Head by head: rows of `hit` that see `position` of sequence 0 under kv_head are lost as told, all
// else keeps the clean bits.
void expect_blast_radius(AttendProblem* clean, AttendProblem* hit, int64_t position, int kv_head,
                         bool lse_lost) {
  ASSERT_TRUE(is_ok(clean->run()));
  ASSERT_TRUE(is_ok(hit->run()));
  const AttendSpec& spec = clean->spec;
  for (int64_t row = 0; row < clean->call.total_q; ++row) {
    const bool first_seq = row < clean->call.cu_seqlens_q[1];
    const int64_t p = clean->cached_len(0) + row;
    const bool sees =
        first_seq && position <= p && (spec.mask.window == 0 || position > p - spec.mask.window);
    for (int head = 0; head < spec.num_heads(); ++head) {
      const bool lost = sees && head / spec.group == kv_head;
      for (int d = 0; d < spec.head_dim; ++d) {
        if (lost) {
          ASSERT_FALSE(std::isfinite(hit->out(row, head, d)))
              << testing::describe(spec) << " row " << row << " head " << head << " d " << d;
        } else {
          ASSERT_EQ(hit->out(row, head, d), clean->out(row, head, d))
              << testing::describe(spec) << " row " << row << " head " << head << " d " << d;
        }
      }
      if (lost && lse_lost) {
        ASSERT_TRUE(std::isnan(hit->lse(row, head))) << testing::describe(spec) << " row " << row;
      } else {
        ASSERT_EQ(hit->lse(row, head), clean->lse(row, head));
      }
    }
  }
  EXPECT_TRUE(testing::matches_reference(*hit));
}

TEST(NonFinite, MetadataWordsReachExactlyTheRowsThatSeeThem) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec = spec_of(name);
    const SlotFormat format = spec.format();
    for (int64_t window : {0, 6}) {
      spec.mask.window = window;
      spec.seqs = {{50, 20}, {33, 2}};
      for (uint16_t word :
           {uint16_t{0x7C00}, uint16_t{0xFC00}, uint16_t{0x7E00}, uint16_t{0xFFFF}}) {
        for (int64_t position : {48, 52, 60}) {
          for (int field = format.rotated() ? 0 : 1; field < 3; ++field) {
            const int offset = field == 0   ? format.norm_offset()
                               : field == 1 ? format.scale_offset()
                                            : format.zero_offset();
            AttendProblem clean(spec), hit(spec);
            std::memcpy(hit.slot(0, position, 1) + offset, &word, 2);
            expect_blast_radius(&clean, &hit, position, 1, field == 0);
          }
        }
      }
    }
  }
}

TEST(NonFinite, TheRadiusIsTheSameForOneRowAndForManyTiles) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec = spec_of(name);
    const SlotFormat format = spec.format();
    spec.tile_tokens = 64;
    for (int64_t rows : {1, 2, 100}) {
      spec.seqs = {{900, rows}, {5, 1}};
      const uint16_t word = 0x7E00;
      for (int64_t position : {0, 63, 64, 500, 899}) {
        AttendProblem clean(spec), hit(spec);
        std::memcpy(hit.slot(0, position, 0) + format.scale_offset(), &word, 2);
        expect_blast_radius(&clean, &hit, position, 0, false);
        if (!format.rotated()) continue;
        AttendProblem lost(spec);
        std::memcpy(lost.slot(0, position, 0) + format.norm_offset(), &word, 2);
        expect_blast_radius(&clean, &lost, position, 0, true);
      }
    }
  }
}

TEST(NonFinite, ANonFiniteNormIsLostEvenWhenEveryProductIsMinusInfinity) {
  // A query against every level's sign: the sum is -inf, which must not pass for a hidden key.
  for (const char* preset : {"4bit_nc", "3bit_nc"}) {
    for (uint16_t word : {uint16_t{0x7C00}, uint16_t{0xFC00}}) {
      AttendSpec spec;
      spec.preset = preset;
      spec.seqs = {{10, 1}};
      AttendProblem problem(spec);
      // All codes 0: levels all negative, and their Hadamard image is the first axis.
      const SlotFormat format = spec.format();
      testing::SlotContent content;
      content.key_codes.assign(64, 0);
      content.value_codes.assign(64, 1);
      content.norm = word;
      content.scale = 0x3C00;
      write_slot(format, content, problem.slot(0, 3, 0));
      for (double sign : {-1.0, 1.0}) {
        for (int d = 0; d < 64; ++d) problem.set_query(0, 0, d, d == 0 ? sign * 4.0 : 0.0);
        EXPECT_TRUE(testing::runs_and_matches(&problem));
        EXPECT_TRUE(std::isnan(problem.lse(0, 0)));
        EXPECT_TRUE(std::isnan(problem.out(0, 0, 9)));
      }
    }
  }
}

TEST(NonFinite, NanBytesOfFp8Keys) {
  for (const char* dialect : {"e4m3", "e4b15"}) {
    AttendSpec spec;
    spec.preset = "k8v4";
    spec.fp8 = dialect[2] == 'm' ? KeyCode::kFp8E4M3 : KeyCode::kFp8E4B15;
    spec.seqs = {{50, 4}, {9, 1}};
    for (int byte : {0x7f, 0xff}) {
      AttendProblem clean(spec), hit(spec);
      hit.slot(0, 51, 1)[37] = static_cast<std::byte>(byte);
      if (spec.fp8 == KeyCode::kFp8E4M3) {
        expect_blast_radius(&clean, &hit, 51, 1, true);
      } else {
        EXPECT_TRUE(testing::runs_and_matches(&hit));  // finite there
        EXPECT_TRUE(std::isfinite(hit.lse(3, 3)));
      }
    }
  }
}

TEST(NonFinite, RawChunkRows) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec = spec_of(name);
    spec.raw_chunk = true;
    spec.seqs = {{20, 6}, {9, 1}};
    for (double bad : {kNaN, kInf, -kInf}) {
      AttendProblem clean(spec), value(spec);
      for (int d = 0; d < 64; ++d) value.set_chunk_value(2, 1, d, bad);
      expect_blast_radius(&clean, &value, 22, 1, false);
      if (!std::isnan(bad)) continue;
      AttendProblem key(spec);
      key.set_chunk_key(2, 1, 5, bad);
      expect_blast_radius(&clean, &key, 22, 1, true);
    }
  }
}

TEST(NonFinite, AQueryIsLostAlone) {
  for (const FormatName& name : format_names()) {
    for (double bad : {kNaN, kInf}) {
      AttendSpec spec = spec_of(name);
      spec.seqs = {{20, 6}};
      AttendProblem clean(spec), hit(spec);
      hit.set_query(3, 2, 11, bad);
      ASSERT_TRUE(is_ok(clean.run()));
      ASSERT_TRUE(is_ok(hit.run()));
      for (int64_t r = 0; r < 6; ++r) {
        if (r != 3) {
          EXPECT_TRUE(same_bits(hit.row_bits(r), clean.row_bits(r)));
        }
      }
      EXPECT_TRUE(std::isnan(hit.lse(3, 2)));
      for (int d = 0; d < 64; ++d) EXPECT_TRUE(std::isnan(hit.out(3, 2, d)));
      EXPECT_EQ(hit.lse(3, 1), clean.lse(3, 1));
      EXPECT_EQ(hit.lse(3, 3), clean.lse(3, 3));
    }
  }
}

TEST(Extreme, HugeScoresStayOneHot) {
  // Scores near 1e8: the output is the value of the largest, no infinity minus infinity.
  for (const FormatName& name : format_names()) {
    for (DType dtype : {DType::kFloat16, DType::kFloat32}) {
      AttendSpec spec = spec_of(name);
      spec.dtype = dtype;
      spec.head_dim = 128;
      spec.seqs = {{30, 2}};
      AttendProblem problem(spec);
      const double norm = spec.format().rotated() ? 6.0e4 : 1.75;
      ASSERT_TRUE(is_ok(problem.store(
          DType::kFloat32,
          [&](int, int64_t p, int, int d) { return d == 3 ? (p == 17 ? norm : -norm) : 0.0; },
          [](int, int64_t p, int, int) { return p == 17 ? 2.0 : -1.0; })));
      for (int64_t r = 0; r < 2; ++r) {
        for (int head = 0; head < 4; ++head) {
          for (int d = 0; d < 128; ++d) problem.set_query(r, head, d, d == 3 ? 3.0e4 : 0.0);
        }
      }
      ASSERT_TRUE(is_ok(problem.run()));
      for (int d = 0; d < 128; ++d) {
        EXPECT_EQ(problem.out(1, 2, d), 2.0);
      }
      const double score = 3.0e4 * norm / std::sqrt(128.0);
      EXPECT_NEAR(problem.lse(1, 2), score, 1e-3 * score);
    }
  }
}

TEST(Extreme, VeryNegativeScoresKeepAllTheMass) {
  // Every visible score near -2e4 beside hidden keys of score zero: no clamping constant may let
  // the hidden ones in.
  for (const FormatName& name : format_names()) {
    for (bool raw : {false, true}) {
      for (int64_t tile : {0, 16}) {
        AttendSpec spec = spec_of(name);
        spec.raw_chunk = raw;
        spec.tile_tokens = tile;
        spec.mask.window = 24;
        spec.seqs = {{100, 9}};
        AttendProblem problem(spec);
        ASSERT_TRUE(is_ok(problem.store(
            DType::kFloat32, [](int, int64_t, int, int d) { return d == 2 ? -1.5 : 0.0; },
            [](int, int64_t p, int, int) { return static_cast<double>(p); })));
        if (raw) {
          for (int64_t r = 0; r < 9; ++r) {
            for (int d = 0; d < 64; ++d) {
              for (int h = 0; h < 2; ++h) {
                problem.set_chunk_key(r, h, d, d == 2 ? -1.5 : 0.0);
                problem.set_chunk_value(r, h, d, static_cast<double>(100 + r));
              }
            }
          }
        }
        const double strength = 2.0e4 * 8 / 1.5;
        for (int64_t r = 0; r < 9; ++r) {
          for (int head = 0; head < 4; ++head) {
            for (int d = 0; d < 64; ++d) problem.set_query(r, head, d, d == 2 ? strength : 0.0);
          }
        }
        ASSERT_TRUE(is_ok(problem.run()));
        for (int64_t r = 0; r < 9; ++r) {
          for (int head = 0; head < 4; ++head) {
            EXPECT_NEAR(problem.lse(r, head), -2.0e4 + std::log(24), 2e-2);
            // Rows of equal keys, raw and packed scores equal to fp32 rounding of 2e4.
            EXPECT_NEAR(problem.out(r, head, 0), static_cast<double>(100 + r) - 11.5, 0.3);
          }
        }
      }
    }
  }
}

TEST(Extreme, NormsAndScalesAtTheEdgesOfTheirWords) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec = spec_of(name);
    const SlotFormat format = spec.format();
    spec.seqs = {{40, 5}};
    AttendProblem problem(spec);
    const uint16_t kWords[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0xBC00};
    for (int64_t p = 0; p < 45; ++p) {
      for (int h = 0; h < 2; ++h) {
        std::byte* slot = problem.slot(0, p, h);
        if (format.rotated()) std::memcpy(slot + format.norm_offset(), &kWords[p % 7], 2);
        std::memcpy(slot + format.scale_offset(), &kWords[p / 7 % 7], 2);
        std::memcpy(slot + format.zero_offset(), &kWords[(p + 3) % 7], 2);
      }
    }
    EXPECT_TRUE(testing::runs_and_matches(&problem));
  }
}

TEST(Extreme, ZeroAndNegativeSoftmaxScales) {
  for (float scale : {0.0f, -0.3f, 1e-30f}) {
    AttendSpec spec;
    AttendProblem problem(spec);
    problem.call.softmax_scale = scale;
    EXPECT_TRUE(testing::runs_and_matches(&problem)) << scale;
  }
}

}  // namespace
}  // namespace kvtile
