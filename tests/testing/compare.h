// Judging an attention result against the float64 oracle. The bound is the design's own and does
// not grow with the context: rounding to the output type plus 1e-5 of the largest visible |value|.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvtile/attention.h"
#include "kvtile/status.h"
#include "tests/testing/generate.h"

namespace kvtile::testing {

inline constexpr double kOutputTolerance = 1e-5;  // of the largest visible |value|
inline constexpr double kLseTolerance = 1e-5;     // absolute up to an lse of 8, relative beyond

::testing::AssertionResult is_ok(const Status& status);
// Failed with `code`, and the message names `argument`.
::testing::AssertionResult fails_with(const Status& status, StatusCode code,
                                      const std::string& argument);

// Bounds of an engine; the defaults are the CPU's.
struct Tolerance {
  double output = kOutputTolerance;
  double lse = kLseTolerance;
};

// The whole batch, or the listed rows (over all heads), plus outputs_contained(). Where the oracle
// is NaN or infinite, so must the result be; where it is finite, so must the result.
::testing::AssertionResult matches_reference(const AttendProblem& problem,
                                             const Tolerance& bound = {});
::testing::AssertionResult rows_match_reference(const AttendProblem& problem,
                                                const std::vector<int64_t>& rows,
                                                const Tolerance& bound = {});

// run() and matches_reference() in one.
::testing::AssertionResult runs_and_matches(AttendProblem* problem, const RunOptions& options = {});

// Runs `call` as given but into fresh contiguous outputs and exact workspace, and returns the bytes
// of every row: output then lse, head by head. For calls derived from a problem by hand.
using RowBits = std::vector<std::vector<std::byte>>;
Status run_rows(AttentionCall call, const RunOptions& options, RowBits* rows);

::testing::AssertionResult same_bits(const std::vector<std::byte>& a,
                                     const std::vector<std::byte>& b);

}  // namespace kvtile::testing
