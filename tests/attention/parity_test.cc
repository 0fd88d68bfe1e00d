// The engine against the float64 oracle over every case list, at the engine's own bound.
#include <gtest/gtest.h>

#include "tests/testing/cases.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;

void expect_parity(const std::vector<AttendSpec>& cases) {
  int failures = 0;
  for (const AttendSpec& spec : cases) {
    AttendProblem problem(spec);
    const ::testing::AssertionResult result = testing::runs_and_matches(&problem);
    EXPECT_TRUE(result);
    if (!result && ++failures == 10) return;  // enough to see the pattern
  }
}

TEST(Parity, HeadDims) { expect_parity(testing::head_dim_cases()); }
TEST(Parity, Geometry) { expect_parity(testing::geometry_cases()); }
TEST(Parity, Lengths) { expect_parity(testing::length_cases()); }
TEST(Parity, Masks) { expect_parity(testing::mask_cases()); }
TEST(Parity, DTypes) { expect_parity(testing::dtype_cases()); }

TEST(Parity, RandomBatches) {
  std::vector<AttendSpec> cases;
  for (uint64_t seed = 1; seed <= 400; ++seed) cases.push_back(testing::random_spec(seed));
  expect_parity(cases);
}

TEST(Parity, LargePrefillRowsSampled) {
  // Big enough for every blocking of a prefill kernel to have full tiles and a fringe.
  for (const testing::FormatName& name : testing::format_names()) {
    for (bool raw : {false, true}) {
      AttendSpec spec;
      spec.preset = name.preset;
      spec.fp8 = name.fp8;
      spec.head_dim = 128;
      spec.num_kv_heads = 1;
      spec.group = 4;
      spec.raw_chunk = raw;
      spec.seqs = {{1000, 261}};
      spec.seed = raw ? 5 : 6;
      AttendProblem problem(spec);
      ASSERT_TRUE(testing::is_ok(problem.run()));
      EXPECT_TRUE(testing::rows_match_reference(
          problem, {0, 1, 15, 16, 31, 32, 63, 64, 127, 128, 129, 200, 255, 256, 259, 260}))
          << testing::describe(spec);
    }
  }
}

}  // namespace
}  // namespace kvtile
