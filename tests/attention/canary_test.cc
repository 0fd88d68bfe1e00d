// Canaries with closed-form answers, written through the store. UNI counts keys: zero keys, values
// constant over the head. HOT finds a needle: one one-hot key among zeros.
#include <gtest/gtest.h>

#include <cmath>
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

double zero_key(int, int64_t, int, int) { return 0.0; }

AttendSpec spec_of(const FormatName& name) {
  AttendSpec spec;
  spec.preset = name.preset;
  spec.fp8 = name.fp8;
  return spec;
}

// Values a store holds exactly: the range is the number of codes less one, so the scale is 1.
double ramp(const AttendSpec& spec, int d) {
  const int top = (1 << value_bits(spec.format().value)) - 1;
  return spec.head_dim > top ? d % (top + 1) : d % 2 * top;
}

// Zero raw keys, raw values constant per row.
template <typename Fn>
void fill_chunk(AttendProblem* problem, const Fn& value) {
  for (int64_t r = 0; r < problem->call.total_q; ++r) {
    for (int h = 0; h < problem->spec.num_kv_heads; ++h) {
      for (int d = 0; d < problem->spec.head_dim; ++d) {
        problem->set_chunk_key(r, h, d, 0.0);
        problem->set_chunk_value(r, h, d, value(r));
      }
    }
  }
}

void expect_row(const AttendProblem& problem, int64_t row, double want, double want_lse) {
  for (int head = 0; head < problem.call.num_heads; ++head) {
    for (int d = 0; d < problem.spec.head_dim; ++d) {
      ASSERT_NEAR(problem.out(row, head, d), want,
                  1e-6 * std::fabs(want) + 0.5 * testing::spacing(problem.spec.dtype, want))
          << testing::describe(problem.spec) << " row " << row << " head " << head << " d " << d;
    }
    ASSERT_NEAR(problem.lse(row, head), want_lse, 2e-6 * std::max(1.0, std::fabs(want_lse)));
  }
}

TEST(Uni, CachedOnesAndNewZerosCountTheKeys) {
  for (const FormatName& name : format_names()) {
    for (bool raw : {false, true}) {
      for (int64_t cached : {1, 31, 400, 5000}) {
        AttendSpec spec = spec_of(name);
        spec.raw_chunk = raw;
        spec.seqs = {{cached, 7}};
        AttendProblem problem(spec);
        ASSERT_TRUE(is_ok(problem.store(DType::kFloat32, zero_key, [&](int, int64_t p, int, int) {
          return p < cached ? 1.0 : 0.0;
        })));
        if (raw) fill_chunk(&problem, [](int64_t) { return 0.0; });
        ASSERT_TRUE(is_ok(problem.run()));
        for (int64_t r = 0; r < 7; ++r) {
          const auto count = static_cast<double>(cached + r + 1);
          expect_row(problem, r, static_cast<double>(cached) / count, std::log(count));
        }
      }
    }
  }
}

TEST(Uni, MixedBatchKeepsEachRequestsOwnContext) {
  // A fresh prompt as long as the longest total beside requests with cached prefixes and drafts.
  for (const FormatName& name : format_names()) {
    for (bool raw : {false, true}) {
      AttendSpec spec = spec_of(name);
      spec.raw_chunk = raw;
      spec.head_dim = 32;
      spec.num_kv_heads = 1;
      spec.seqs = {{0, 1000}, {400, 50}, {3, 5}, {990, 5}, {700, 1}, {0, 1}};
      AttendProblem problem(spec);
      ASSERT_TRUE(is_ok(problem.store(DType::kFloat32, zero_key, [&](int s, int64_t p, int, int) {
        return p < problem.cached_len(s) ? 1.0 + s : 0.0;
      })));
      if (raw) fill_chunk(&problem, [](int64_t) { return 0.0; });
      ASSERT_TRUE(is_ok(problem.run()));
      int64_t row = 0;
      for (int s = 0; s < problem.num_seqs(); ++s) {
        for (int64_t i = 0; i < problem.q_len(s); ++i, ++row) {
          const auto cached = static_cast<double>(problem.cached_len(s));
          const double count = cached + static_cast<double>(i) + 1;
          expect_row(problem, row, (1.0 + s) * cached / count, std::log(count));
        }
      }
    }
  }
}

TEST(Uni, ConstantsAreExactInEveryDType) {
  for (const FormatName& name : format_names()) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (double constant : {5.0, 30000.0, -0.375}) {
        if (constant == 30000.0 && dtype == DType::kBFloat16) continue;  // not a bf16 number
        for (int64_t tile : {0, 16, 128}) {
          AttendSpec spec = spec_of(name);
          spec.dtype = dtype;
          spec.tile_tokens = tile;
          spec.seqs = {{4095, 1}, {100, 3}};
          AttendProblem problem(spec);
          ASSERT_TRUE(is_ok(problem.store(DType::kFloat32, zero_key,
                                          [&](int, int64_t, int, int) { return constant; })));
          ASSERT_TRUE(is_ok(problem.run()));
          for (int64_t r = 0; r < 4; ++r) {
            for (int h = 0; h < 4; ++h) {
              for (int d = 0; d < 64; ++d) ASSERT_EQ(problem.out(r, h, d), constant);
            }
          }
        }
      }
    }
  }
}

TEST(Uni, EveryElementOfARampArrivesAtItsPlace) {
  // One key per row of the head: output element d is value element d, for every query length.
  for (const FormatName& name : format_names()) {
    for (int head_dim : testing::head_dims(name)) {
      for (int64_t q : {1, 2, 5, 33}) {
        AttendSpec spec = spec_of(name);
        spec.head_dim = head_dim;
        spec.seqs = {{10, q}};
        spec.dtype = DType::kFloat32;
        AttendProblem problem(spec);
        ASSERT_TRUE(is_ok(problem.store(DType::kFloat32, zero_key,
                                        [&](int, int64_t, int, int d) { return ramp(spec, d); })));
        ASSERT_TRUE(is_ok(problem.run()));
        for (int64_t r = 0; r < q; ++r) {
          for (int d = 0; d < head_dim; ++d) {
            ASSERT_NEAR(problem.out(r, 3, d), ramp(spec, d), 3e-5)
                << testing::describe(spec) << " d " << d;
          }
        }
      }
    }
  }
}

TEST(Uni, OneConstantPerKvHeadNeverBleedsIntoTheNext) {
  for (int group : {5, 6, 7, 12, 17, 24, 71}) {
    AttendSpec spec;
    spec.group = group;
    spec.num_kv_heads = 3;
    spec.seqs = {{50, 1}, {20, 3}};
    AttendProblem problem(spec);
    ASSERT_TRUE(is_ok(problem.store(DType::kFloat32, zero_key,
                                    [](int, int64_t, int h, int) { return 1.0 + h; })));
    ASSERT_TRUE(is_ok(problem.run()));
    for (int64_t r = 0; r < 4; ++r) {
      for (int head = 0; head < 3 * group; ++head) {
        for (int d = 0; d < 64; ++d) ASSERT_EQ(problem.out(r, head, d), 1 + head / group);
      }
    }
  }
}

TEST(Uni, WindowEdgesCountTheKeys) {
  // Value = 2^-k for the k-th key back from the row would be ambiguous; positions are not.
  for (const FormatName& name : format_names()) {
    for (int64_t window : {1, 2, 31, 32, 33, 2048}) {
      for (bool raw : {false, true}) {
        AttendSpec spec = spec_of(name);
        spec.head_dim = 32;
        spec.raw_chunk = raw;
        spec.mask.window = window;
        spec.seqs = {{3000, 3}, {255, 1}, {0, 40}};
        AttendProblem problem(spec);
        ASSERT_TRUE(is_ok(problem.store(DType::kFloat32, zero_key, [](int, int64_t p, int, int) {
          return static_cast<double>(p % 1024);
        })));
        std::vector<double> position;
        for (int s = 0; s < 3; ++s) {
          for (int64_t i = 0; i < problem.q_len(s); ++i) {
            position.push_back(static_cast<double>(problem.cached_len(s) + i));
          }
        }
        if (raw) {
          fill_chunk(&problem,
                     [&](int64_t r) { return std::fmod(position[static_cast<size_t>(r)], 1024); });
        }
        ASSERT_TRUE(is_ok(problem.run()));
        for (int64_t r = 0; r < problem.call.total_q; ++r) {
          const auto p = static_cast<int64_t>(position[static_cast<size_t>(r)]);
          const int64_t begin = std::max<int64_t>(0, p - window + 1);
          double sum = 0;
          for (int64_t k = begin; k <= p; ++k) sum += static_cast<double>(k % 1024);
          const auto count = static_cast<double>(p + 1 - begin);
          for (int head = 0; head < 4; ++head) {
            ASSERT_NEAR(problem.lse(r, head), std::log(count), 1e-5);
            ASSERT_NEAR(problem.out(r, head, 31), sum / count, 1e-5 * 1024);
          }
        }
      }
    }
  }
}

TEST(Uni, SinkLogitTakesItsShare) {
  for (const FormatName& name : format_names()) {
    for (bool raw : {false, true}) {
      AttendSpec spec = spec_of(name);
      spec.sinks = true;
      spec.raw_chunk = raw;
      spec.seqs = {{9, 2}, {-1, 1}};
      AttendProblem problem(spec);
      const std::vector<float> sinks = {0.0f, std::log(10.0f), -100.0f, 30.0f};
      problem.call.sinks = sinks.data();
      ASSERT_TRUE(is_ok(
          problem.store(DType::kFloat32, zero_key, [](int, int64_t, int, int) { return 1.0; })));
      if (raw) fill_chunk(&problem, [](int64_t) { return 1.0; });
      ASSERT_TRUE(is_ok(problem.run()));
      for (int64_t r = 0; r < 2; ++r) {
        for (int head = 0; head < 4; ++head) {
          const auto count = static_cast<double>(10 + r);
          const double sink = std::exp(static_cast<double>(sinks[static_cast<size_t>(head)]));
          EXPECT_NEAR(problem.out(r, head, 0), count / (count + sink), 2e-6);
          EXPECT_NEAR(problem.lse(r, head), std::log(count + sink), 1e-5);
        }
      }
      for (int head = 0; head < 4; ++head) {
        EXPECT_EQ(problem.lse(2, head), -std::numeric_limits<double>::infinity());
        EXPECT_EQ(problem.out(2, head, 0), 0.0);
      }
    }
  }
}

TEST(Uni, RecycledPagesFollowTheTableNotTheirIds) {
  // A windowed pool that reuses its pages: the table repeats ids modulo 65 blocks.
  constexpr int kBlock = 16, kRing = 65;
  for (int64_t total : {1000, 1024, 1040, 1041, 2079, 5000}) {
    AttendSpec spec;
    spec.head_dim = 32;
    spec.num_kv_heads = 1;
    spec.group = 1;
    spec.mask.window = 1024;
    spec.block_size = kBlock;
    spec.seqs = {{kRing * kBlock - 1, 1}};
    spec.mask.window = 0;
    AttendProblem ring(spec);  // gives a pool of kRing used pages
    ASSERT_TRUE(is_ok(ring.store(DType::kFloat32, zero_key, [&](int, int64_t p, int, int) {
      // The newest position that falls on this ring slot.
      const int64_t newest = p + (total - 1 - p) / (kRing * kBlock) * (kRing * kBlock);
      return static_cast<double>(newest % 997);
    })));
    std::vector<int32_t> table;
    for (int64_t b = 0; b * kBlock < total; ++b) {
      table.push_back(static_cast<int32_t>(ring.slot_index(0, b % kRing * kBlock) / kBlock));
    }
    const auto seq_len = static_cast<int32_t>(total);
    ring.call.block_table = table.data();
    ring.call.max_blocks = static_cast<int64_t>(table.size());
    ring.call.seq_lens = &seq_len;
    ring.call.mask.window = 1024;
    ASSERT_TRUE(is_ok(ring.run()));
    double sum = 0;
    const int64_t begin = std::max<int64_t>(0, total - 1024);
    for (int64_t p = begin; p < total; ++p) sum += static_cast<double>(p % 997);
    EXPECT_NEAR(ring.out(0, 0, 5), sum / static_cast<double>(total - begin), 1e-5 * 997);
  }
}

// Needle: key 1.5 * k * e_i at one position, query strong enough that it takes everything.
void expect_needle(const AttendSpec& spec, int64_t position) {
  AttendProblem problem(spec);
  const int i = 5;
  ASSERT_TRUE(is_ok(problem.store(
      DType::kFloat32,
      [&](int, int64_t p, int, int d) { return p == position && d == i ? 1.5 : 0.0; },
      [&](int, int64_t p, int h, int d) { return p == position ? h + ramp(spec, d) : -7.0; })));
  const double strength = 64.0 * std::sqrt(spec.head_dim) / 1.5;
  for (int64_t r = 0; r < problem.call.total_q; ++r) {
    for (int head = 0; head < problem.call.num_heads; ++head) {
      for (int d = 0; d < spec.head_dim; ++d) {
        problem.set_query(r, head, d, d == i ? strength : 0.0);
      }
    }
  }
  ASSERT_TRUE(is_ok(problem.run()));
  for (int64_t r = 0; r < problem.call.total_q; ++r) {
    for (int head = 0; head < problem.call.num_heads; ++head) {
      for (int d = 0; d < spec.head_dim; ++d) {
        const double want = head / spec.group + ramp(spec, d);
        ASSERT_NEAR(problem.out(r, head, d), want,
                    1e-5 * 17 + 0.5 * testing::spacing(spec.dtype, want))
            << testing::describe(spec) << " needle at " << position << " row " << r;
      }
      ASSERT_NEAR(problem.lse(r, head), 64.0, 64 * 4e-3);
    }
  }
  EXPECT_TRUE(testing::rows_match_reference(problem, {0, problem.call.total_q - 1}));
}

TEST(Hot, NeedleAtEveryDepth) {
  for (const FormatName& name : format_names()) {
    AttendSpec spec = spec_of(name);
    spec.group = 6;
    spec.num_kv_heads = 1;
    spec.seqs = {{9819, 4}};
    for (int64_t position : {0, 1, 981, 4909, 8837, 9818, 9819}) expect_needle(spec, position);
  }
}

TEST(Hot, NeedleInTheLastSlotOfEachPageForEveryBlockSize) {
  for (int block_size : {1, 16, 32, 64, 128, 256, 784, 2096}) {
    AttendSpec spec;
    spec.block_size = block_size;
    spec.num_kv_heads = 1;
    spec.group = 2;
    spec.seqs = {{3 * block_size, 1}};
    for (int page = 0; page < 3; ++page) expect_needle(spec, (page + 1) * block_size - 1);
    expect_needle(spec, 3 * block_size);
  }
}

TEST(Hot, EveryHeadDim) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : testing::head_dims(name)) {
      AttendSpec spec = spec_of(name);
      spec.head_dim = head_dim;
      spec.seqs = {{77, 2}};
      expect_needle(spec, 40);
    }
  }
}

}  // namespace
}  // namespace kvtile
