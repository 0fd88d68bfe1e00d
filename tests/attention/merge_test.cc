// Partial states form a commutative monoid: identity (anything, -inf), whose payload is never read;
// any order, any partition. Natural log throughout.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include "kvtile/attention.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"
#include "tests/testing/partial_states.h"

namespace kvtile {
namespace {

using testing::fails_with;
using testing::is_ok;
using testing::Random;
using testing::SentinelBuffer;
using States = testing::PartialStates;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The definition in float64.
double expected_merge(States* states, int64_t token, int head, int d, double* lse) {
  double top = -static_cast<double>(kInf);
  for (int i = 0; i < states->num; ++i) {
    top = std::max(top, static_cast<double>(states->lse_of(i, token, head)));
  }
  double sum = 0, value = 0;
  for (int i = 0; i < states->num; ++i) {
    const double weight = std::exp(static_cast<double>(states->lse_of(i, token, head)) - top);
    sum += weight;
    value += weight * static_cast<double>(states->out_row(i, token, head)[d]);
  }
  *lse = top + std::log(sum);
  return value / sum;
}

TEST(Merge, OnlyEmptyStatesGiveTheEmptyStateWhateverTheyHold) {
  for (int n : {1, 2, 3, 31, 32, 33}) {
    for (float payload : {kNaN, kInf, -kInf, 7.0f, 3.4e38f}) {
      States states(n, 3, 2, 16);
      std::fill(states.out.begin(), states.out.end(), payload);
      std::fill(states.lse.begin(), states.lse.end(), -kInf);
      ASSERT_TRUE(is_ok(merge_states(states.call())));
      for (float x : states.merged_out) EXPECT_EQ(x, 0.0f);
      for (float x : states.merged_lse) EXPECT_EQ(x, -kInf);
    }
  }
}

TEST(Merge, OneLiveStateAmongEmptyOnesIsCopiedBitForBit) {
  constexpr float kSpecial[] = {-0.0f, 0.0f, kInf, -kInf, kNaN, -kNaN, 1.0e-45f, -3.4e38f};
  for (int n : {1, 2, 3, 31, 32, 33}) {
    for (int live : {0, n / 2, n - 1}) {
      for (float lse : {0.0f, -0.0f, -2.0e4f, 3.7f, 1.0e30f, -1.0e30f, -1.0e-30f}) {
        States states(n, 3, 2, 16);
        Random random(static_cast<uint64_t>(n));
        std::fill(states.out.begin(), states.out.end(), kNaN);
        std::fill(states.lse.begin(), states.lse.end(), -kInf);
        for (int64_t t = 0; t < 3; ++t) {
          for (int h = 0; h < 2; ++h) {
            states.lse_of(live, t, h) = lse;
            for (int d = 0; d < 16; ++d) {
              states.out_row(live, t, h)[d] = static_cast<float>(random.normal() * 1e4);
            }
            std::copy_n(std::begin(kSpecial), std::size(kSpecial), states.out_row(live, t, h));
          }
        }
        ASSERT_TRUE(is_ok(merge_states(states.call())));
        EXPECT_EQ(std::memcmp(states.merged_out.data(), states.out_row(live, 0, 0),
                              states.merged_out.size() * 4),
                  0);
        for (float x : states.merged_lse) EXPECT_EQ(std::memcmp(&x, &lse, sizeof(lse)), 0) << lse;
      }
    }
  }
}

TEST(Merge, NearEmptyStatesKeepTheirShare) {
  // Pairs of log weights with a closed form; nothing is clamped.
  const struct {
    float a, b;
  } kPairs[] = {{-2.0e4f, -2.0e4f}, {-1.0e30f, -1.0e30f}, {-2.0e4f, -2.0e4f + 1.0f},
                {-88.0f, 0.0f},     {0.0f, -88.0f},       {-700.0f, -701.0f},
                {1.0e4f, 1.0e4f},   {3.0e38f, 3.0e38f},   {-3.0e38f, -kInf},
                {-103.0f, -kInf},   {50.0f, -50.0f}};
  for (const auto& pair : kPairs) {
    States states(2, 1, 1, 4);
    states.lse_of(0, 0, 0) = pair.a;
    states.lse_of(1, 0, 0) = pair.b;
    std::fill(states.out_row(0, 0, 0), states.out_row(0, 0, 0) + 4, 1.0f);
    std::fill(states.out_row(1, 0, 0), states.out_row(1, 0, 0) + 4, pair.b == -kInf ? kNaN : 3.0f);
    ASSERT_TRUE(is_ok(merge_states(states.call())));
    const double share =
        1.0 / (1.0 + std::exp(static_cast<double>(pair.b) - static_cast<double>(pair.a)));
    EXPECT_NEAR(states.merged(0, 0, 2), share + 3.0 * (1.0 - share), 1e-6) << pair.a;
    const double top = std::max(static_cast<double>(pair.a), static_cast<double>(pair.b));
    const double rest = std::min(static_cast<double>(pair.a), static_cast<double>(pair.b)) - top;
    const double lse = top + std::log1p(std::exp(rest));
    EXPECT_NEAR(states.merged_lse_of(0, 0), lse,
                testing::spacing(DType::kFloat32, std::max(1.0, std::fabs(lse))));
  }
}

TEST(Merge, CountsOfEqualKeysAddUp) {
  // Natural log: states of n_i equal keys have lse ln n_i; the union has ln of the sum.
  const std::vector<std::vector<int>> kPartitions = {
      {3072, 64}, {64, 3072}, {1, 1}, {1, 2, 4}, {1000000, 1}, {7, 0, 13}, {0, 5}, {5, 5, 5, 5}};
  for (const std::vector<int>& counts : kPartitions) {
    States states(static_cast<int>(counts.size()), 1, 1, 8);
    double total = 0, weighted = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      const int s = static_cast<int>(i);
      states.lse_of(s, 0, 0) = std::log(static_cast<float>(counts[i]));
      std::fill(states.out_row(s, 0, 0), states.out_row(s, 0, 0) + 8,
                counts[i] == 0 ? kNaN : static_cast<float>(i + 1));
      total += counts[i];
      weighted += counts[i] * static_cast<double>(i + 1);
    }
    ASSERT_TRUE(is_ok(merge_states(states.call())));
    EXPECT_NEAR(states.merged(0, 0, 0), weighted / total, 2e-6 * weighted / total);
    EXPECT_NEAR(states.merged_lse_of(0, 0), std::log(total), 1e-6 * std::log(total));
  }
}

TEST(Merge, NonFiniteRowsStayInTheirRow) {
  States states(3, 4, 2, 8);
  fill_random(&states, 5, 2.0);
  States clean = states;
  ASSERT_TRUE(is_ok(merge_states(clean.call())));
  states.lse_of(1, 2, 0) = kNaN;
  states.out_row(2, 1, 1)[3] = kNaN;
  states.lse_of(0, 3, 1) = kInf;
  ASSERT_TRUE(is_ok(merge_states(states.call())));
  for (int64_t t = 0; t < 4; ++t) {
    for (int h = 0; h < 2; ++h) {
      const bool row_lost = (t == 2 && h == 0) || (t == 3 && h == 1);
      for (int d = 0; d < 8; ++d) {
        if (row_lost || (t == 1 && h == 1 && d == 3)) {
          EXPECT_TRUE(std::isnan(states.merged(t, h, d)));
        } else {
          EXPECT_EQ(states.merged(t, h, d), clean.merged(t, h, d));
        }
      }
      if (row_lost) {
        EXPECT_TRUE(std::isnan(states.merged_lse_of(t, h)));
      } else {
        EXPECT_EQ(states.merged_lse_of(t, h), clean.merged_lse_of(t, h));
      }
    }
  }
}

TEST(Merge, MatchesFloat64ForEveryCountAndDType) {
  for (int n : {1, 2, 7, 32, 100}) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      States states(n, 5, 3, 40);
      fill_random(&states, static_cast<uint64_t>(n), 4.0);
      for (int i = 0; i < n; i += 3) states.lse_of(i, 1, 1) = -kInf;
      states.lse_of(0, 1, 1) = 0.5f;
      SentinelBuffer out(static_cast<size_t>(5 * 3 * 40 * dtype_bytes(dtype)));
      MergeCall call = states.call();
      call.out = out.data();
      call.dtype = dtype;
      ASSERT_TRUE(is_ok(merge_states(call)));
      EXPECT_TRUE(out.margins_intact());
      int64_t i = 0;
      for (int64_t t = 0; t < 5; ++t) {
        for (int h = 0; h < 3; ++h) {
          for (int d = 0; d < 40; ++d, ++i) {
            double lse = 0;
            const double want = expected_merge(&states, t, h, d, &lse);
            // One rounding, to the output type: partial sums are never narrowed.
            EXPECT_NEAR(testing::load_element(out.data(), dtype, i), want,
                        (0.5 + 1e-3) * testing::spacing(dtype, want) + 1e-7);
            EXPECT_NEAR(states.merged_lse_of(t, h), lse, 2e-6);
          }
        }
      }
    }
  }
}

TEST(Merge, AnyOrderAndAnyGroupingAgree) {
  States states(6, 4, 2, 16);
  fill_random(&states, 77, 3.0);
  ASSERT_TRUE(is_ok(merge_states(states.call())));
  const std::vector<float> want = states.merged_out;
  std::vector<int> order(6);
  std::iota(order.begin(), order.end(), 0);
  for (int round = 0; round < 20; ++round) {
    std::next_permutation(order.begin(), order.end());
    MergeCall call = states.call();
    std::vector<PartialState> permuted;
    for (int i : order) permuted.push_back(states.partial[static_cast<size_t>(i)]);
    call.states = permuted.data();
    ASSERT_TRUE(is_ok(merge_states(call)));
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(states.merged_out[i], want[i], 5e-7);
    // ((a b) c) ... two at a time, in place.
    States pair(2, 4, 2, 16);
    const size_t out_floats = 4 * 2 * 16, lse_floats = 4 * 2;
    std::copy_n(permuted[0].out, out_floats, pair.out_row(0, 0, 0));
    std::copy_n(permuted[0].lse, lse_floats, &pair.lse_of(0, 0, 0));
    for (size_t s = 1; s < permuted.size(); ++s) {
      std::copy_n(permuted[s].out, out_floats, pair.out_row(1, 0, 0));
      std::copy_n(permuted[s].lse, lse_floats, &pair.lse_of(1, 0, 0));
      MergeCall step = pair.call();
      step.out = pair.out_row(0, 0, 0);
      step.lse = &pair.lse_of(0, 0, 0);
      ASSERT_TRUE(is_ok(merge_states(step)));
    }
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(pair.out[i], want[i], 2e-6);
  }
}

TEST(Merge, StridedStatesAndOutputsGiveTheBitsOfContiguousOnes) {
  constexpr int kHeads = 5, kDim = 24;
  constexpr int64_t kTokens = 77;
  States states(2, kTokens, kHeads, kDim);
  fill_random(&states, 13, 2.0);
  ASSERT_TRUE(is_ok(merge_states(states.call())));
  // State 0: lse as a transposed [tokens, heads] view, rows of out padded. State 1: lse as a column
  // slice of a wider tensor.
  std::vector<float> transposed(kTokens * kHeads), wide(kHeads * (kTokens + 9), kNaN);
  std::vector<float> padded(kTokens * (kHeads * (kDim + 3) + 2), kNaN);
  constexpr int64_t kHeadStride = kDim + 3, kTokenStride = kHeads * kHeadStride + 2;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHeads; ++h) {
      transposed[static_cast<size_t>(t * kHeads + h)] = states.lse_of(0, t, h);
      wide[static_cast<size_t>(h * (kTokens + 9) + 4 + t)] = states.lse_of(1, t, h);
      std::copy_n(states.out_row(0, t, h), kDim,
                  padded.data() + t * kTokenStride + h * kHeadStride);
    }
  }
  std::vector<float> want = states.merged_out, want_lse = states.merged_lse;
  MergeCall call = states.call();
  states.partial[0].out = padded.data();
  states.partial[0].out_stride_token = kTokenStride;
  states.partial[0].out_stride_head = kHeadStride;
  states.partial[0].lse = transposed.data();
  states.partial[0].lse_stride_head = 1;
  states.partial[0].lse_stride_token = kHeads;
  states.partial[1].lse = wide.data() + 4;
  states.partial[1].lse_stride_head = kTokens + 9;
  SentinelBuffer out(((kTokens - 1) * kTokenStride + (kHeads - 1) * kHeadStride + kDim) * 4);
  SentinelBuffer lse(kTokens * kHeads * 4);
  call.out = out.data();
  call.out_stride_token = kTokenStride;
  call.out_stride_head = kHeadStride;
  call.lse = reinterpret_cast<float*>(lse.data());
  call.lse_stride_head = 1;
  call.lse_stride_token = kHeads;
  ASSERT_TRUE(is_ok(merge_states(call)));
  EXPECT_TRUE(out.margins_intact() && lse.margins_intact());
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHeads; ++h) {
      const auto offset = static_cast<size_t>(t * kTokenStride + h * kHeadStride) * 4;
      ASSERT_EQ(std::memcmp(out.data() + offset,
                            &want[static_cast<size_t>((t * kHeads + h) * kDim)], kDim * 4),
                0);
      const size_t gap = offset + kDim * 4;
      ASSERT_TRUE(out.untouched(gap, std::min(out.size(), gap + 12)));
      ASSERT_EQ(reinterpret_cast<const float*>(lse.data())[t * kHeads + h],
                want_lse[static_cast<size_t>(h * kTokens + t)]);
    }
  }
}

TEST(Merge, ThreadsDoNotMatterAndLseIsOptional) {
  States states(9, 33, 4, 64);
  fill_random(&states, 3, 2.0);
  RunOptions options;
  options.num_threads = 1;
  ASSERT_TRUE(is_ok(merge_states(states.call(), options)));
  const std::vector<float> want = states.merged_out;
  for (int threads : {2, 3, 8}) {
    options.num_threads = threads;
    std::fill(states.merged_out.begin(), states.merged_out.end(), kNaN);
    MergeCall call = states.call();
    call.lse = nullptr;
    ASSERT_TRUE(is_ok(merge_states(call, options)));
    EXPECT_EQ(std::memcmp(states.merged_out.data(), want.data(), want.size() * 4), 0);
  }
}

TEST(Merge, RefusesMalformedCallsByName) {
  States states(2, 3, 2, 8);
  fill_random(&states, 1, 1.0);
  const auto refused = [&](const char* argument, auto change,
                           StatusCode code = StatusCode::kInvalidArgument) {
    MergeCall call = states.call();
    change(&call);
    std::fill(states.merged_out.begin(), states.merged_out.end(), 42.0f);
    EXPECT_TRUE(fails_with(merge_states(call), code, argument));
    for (float x : states.merged_out) ASSERT_EQ(x, 42.0f);
  };
  refused("states", [](MergeCall* c) { c->states = nullptr; });
  refused("num_states", [](MergeCall* c) { c->num_states = 0; });
  refused("total_q", [](MergeCall* c) { c->total_q = -1; });
  refused("num_heads", [](MergeCall* c) { c->num_heads = 0; });
  refused("head_dim", [](MergeCall* c) { c->head_dim = 0; });
  refused("out", [](MergeCall* c) { c->out = nullptr; });
  refused("dtype", [](MergeCall* c) { c->dtype = static_cast<DType>(5); });
  refused("states[1].lse", [&](MergeCall*) { states.partial[1].lse = nullptr; });
  refused("states[0].out", [&](MergeCall*) { states.partial[0].out = nullptr; });
  RunOptions options;
  options.backend = "elsewhere";
  EXPECT_TRUE(
      fails_with(merge_states(states.call(), options), StatusCode::kUnavailable, "elsewhere"));
  MergeCall nothing = states.call();
  nothing.total_q = 0;
  EXPECT_TRUE(is_ok(merge_states(nothing)));
}

TEST(Merge, TwoHalvesOfAContextEqualTheWhole) {
  // Keys split at a block boundary, each half attended on its own, then merged: the unsplit result.
  for (const testing::FormatName& name : testing::format_names()) {
    testing::AttendSpec spec;
    spec.preset = name.preset;
    spec.fp8 = name.fp8;
    spec.mask.causal = false;
    spec.seqs = {{700, 3}};
    testing::AttendProblem problem(spec);
    ASSERT_TRUE(is_ok(problem.run()));
    for (int32_t split_block : {0, 1, 10, 43}) {
      const int32_t split = split_block * spec.block_size;
      States states(2, 3, 4, 64);
      const int32_t lens[] = {split, 703 - split};
      for (int half = 0; half < 2; ++half) {
        AttentionCall call = problem.call;
        call.seq_lens = &lens[half];
        call.block_table = problem.call.block_table + (half == 0 ? 0 : split_block);
        call.out = states.out_row(half, 0, 0);
        call.lse = &states.lse_of(half, 0, 0);
        size_t bytes = 0;
        ASSERT_TRUE(is_ok(workspace_bytes(call, {}, &bytes)));
        SentinelBuffer workspace(bytes);
        call.max_blocks -= half == 0 ? 0 : split_block;
        ASSERT_TRUE(is_ok(attend(call, Workspace{workspace.data(), bytes})));
      }
      ASSERT_TRUE(is_ok(merge_states(states.call())));
      for (int64_t r = 0; r < 3; ++r) {
        for (int h = 0; h < 4; ++h) {
          EXPECT_NEAR(states.merged_lse_of(r, h), problem.lse(r, h), 1e-5);
          for (int d = 0; d < 64; ++d) {
            EXPECT_NEAR(states.merged(r, h, d), problem.out(r, h, d), 2e-5);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtile
