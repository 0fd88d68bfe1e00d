// Comparison against the oracle.
#include "tests/testing/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "src/attention/reference.h"

namespace kvtile::testing {
namespace {

// |value| of every position of one sequence and KV head, largest finite element; 0 where no row
// looks. Raw positions come from the chunk.
std::vector<double> value_magnitudes(const AttendProblem& problem, int seq, int kv_head) {
  const AttentionCall& call = problem.call;
  const int head_dim = call.cache.format.head_dim;
  std::vector<double> magnitudes(static_cast<size_t>(std::max<int64_t>(0, problem.seq_len(seq))),
                                 0.0);
  std::vector<double> value(static_cast<size_t>(head_dim));
  const auto largest = [&value] {
    double m = 0;
    for (double v : value) {
      if (std::isfinite(v)) m = std::max(m, std::fabs(v));
    }
    return m;
  };
  for (int64_t p = problem.packed_begin(seq); p < problem.packed_end(seq); ++p) {
    const int64_t index = problem.slot_index(seq, p);
    reference_decode_slot(
        call.cache.format,
        call.cache.pages + call.cache.slot_offset(index / call.cache.block_size,
                                                  index % call.cache.block_size, kv_head),
        nullptr, value.data());
    magnitudes[static_cast<size_t>(p)] = largest();
  }
  if (call.chunk_value == nullptr) return magnitudes;
  const int64_t stride_head =
      call.chunk_value_stride_head != 0 ? call.chunk_value_stride_head : head_dim;
  const int64_t stride_token = call.chunk_value_stride_token != 0
                                   ? call.chunk_value_stride_token
                                   : stride_head * call.cache.num_kv_heads;
  for (int64_t i = 0; i < problem.q_len(seq); ++i) {
    const int64_t p = problem.cached_len(seq) + i;
    if (p < 0) continue;
    const int64_t offset = (call.cu_seqlens_q[seq] + i) * stride_token + kv_head * stride_head;
    for (int d = 0; d < head_dim; ++d) {
      value[static_cast<size_t>(d)] = load_element(call.chunk_value, call.dtype, offset + d);
    }
    magnitudes[static_cast<size_t>(p)] = largest();
  }
  return magnitudes;
}

bool agree(double got, double want, double tolerance) {
  if (!std::isfinite(want)) return !std::isfinite(got);
  return std::fabs(got - want) <= tolerance;
}

}  // namespace

::testing::AssertionResult is_ok(const Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "status " << static_cast<int>(status.code()) << ": " << status.message();
}

::testing::AssertionResult fails_with(const Status& status, StatusCode code,
                                      const std::string& argument) {
  if (status.code() != code) {
    return ::testing::AssertionFailure()
           << "code " << static_cast<int>(status.code()) << " (" << status.message() << "), wanted "
           << static_cast<int>(code) << " naming " << argument;
  }
  if (status.message().find(argument) == std::string::npos) {
    return ::testing::AssertionFailure()
           << "message \"" << status.message() << "\" does not name " << argument;
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult matches_reference(const AttendProblem& problem, const Tolerance& bound) {
  std::vector<int64_t> rows(static_cast<size_t>(problem.call.total_q));
  std::iota(rows.begin(), rows.end(), 0);
  return rows_match_reference(problem, rows, bound);
}

::testing::AssertionResult rows_match_reference(const AttendProblem& problem,
                                                const std::vector<int64_t>& rows,
                                                const Tolerance& bound) {
  if (!problem.outputs_contained()) {
    return ::testing::AssertionFailure() << "bytes outside the outputs were written";
  }
  const AttentionCall& call = problem.call;
  const int head_dim = call.cache.format.head_dim;
  const int group = call.num_heads / call.cache.num_kv_heads;
  std::vector<double> want(static_cast<size_t>(head_dim));
  std::map<std::pair<int, int>, std::vector<double>> magnitudes;
  for (int64_t row : rows) {
    int seq = 0;
    while (call.cu_seqlens_q[seq + 1] <= row) ++seq;
    const int64_t position = problem.cached_len(seq) + row - call.cu_seqlens_q[seq];
    for (int head = 0; head < call.num_heads; ++head) {
      double want_lse = 0;
      reference_attend_row(call, row, head, want.data(), &want_lse);
      const std::pair<int, int> key(seq, head / group);
      if (magnitudes.find(key) == magnitudes.end()) {
        magnitudes[key] = value_magnitudes(problem, seq, head / group);
      }
      const std::vector<double>& m = magnitudes[key];
      const int64_t end =
          std::max<int64_t>(0, call.mask.causal ? position + 1 : problem.seq_len(seq));
      const int64_t begin = std::min(
          end, call.mask.window > 0 ? std::max<int64_t>(0, position - call.mask.window + 1) : 0);
      double vmax = 0;
      for (int64_t p = begin; p < end; ++p) vmax = std::max(vmax, m[static_cast<size_t>(p)]);

      const auto where = [&] {
        return "row " + std::to_string(row) + " head " + std::to_string(head) + " (seq " +
               std::to_string(seq) + " position " + std::to_string(position) + ")";
      };
      for (int d = 0; d < head_dim; ++d) {
        const double w = want[static_cast<size_t>(d)], g = problem.out(row, head, d);
        const double tolerance =
            0.5 * spacing(call.dtype, std::max(std::fabs(w), std::fabs(g))) + bound.output * vmax;
        if (!agree(g, w, tolerance)) {
          return ::testing::AssertionFailure()
                 << where() << " d " << d << ": got " << g << ", oracle " << w << ", difference "
                 << g - w << ", tolerance " << tolerance << ", vmax " << vmax;
        }
      }
      if (call.lse == nullptr) continue;
      const double got_lse = problem.lse(row, head);
      const bool lse_agrees =
          std::isinf(want_lse) ? got_lse == want_lse
          : std::isnan(want_lse)
              ? std::isnan(got_lse)
              : std::fabs(got_lse - want_lse) <= bound.lse * std::max(1.0, std::fabs(want_lse) / 8);
      if (!lse_agrees) {
        return ::testing::AssertionFailure()
               << where() << " lse: got " << got_lse << ", oracle " << want_lse;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult runs_and_matches(AttendProblem* problem, const RunOptions& options) {
  const Status status = problem->run(options);
  if (!status.ok()) return is_ok(status) << " for " << describe(problem->spec);
  ::testing::AssertionResult result = matches_reference(*problem);
  if (!result) result << " for " << describe(problem->spec);
  return result;
}

Status run_rows(AttentionCall call, const RunOptions& options, RowBits* rows) {
  const int64_t row_bytes = int64_t{call.cache.format.head_dim} * dtype_bytes(call.dtype);
  SentinelBuffer out(static_cast<size_t>(call.total_q * call.num_heads * row_bytes));
  SentinelBuffer lse(static_cast<size_t>(call.total_q * call.num_heads) * sizeof(float));
  call.out = out.data();
  call.lse = reinterpret_cast<float*>(lse.data());
  call.out_stride_token = call.out_stride_head = 0;
  call.lse_stride_token = call.lse_stride_head = 0;
  size_t bytes = 0;
  Status status = workspace_bytes(call, options, &bytes);
  if (!status.ok()) return status;
  SentinelBuffer workspace(bytes);
  status = attend(call, Workspace{workspace.data(), bytes}, options);
  if (!status.ok()) return status;
  if (!out.margins_intact() || !lse.margins_intact() || !workspace.margins_intact()) {
    return Status(StatusCode::kOutOfRange, "bytes outside the outputs were written");
  }
  rows->clear();
  for (int64_t r = 0; r < call.total_q; ++r) {
    auto& row = rows->emplace_back();
    for (int64_t h = 0; h < call.num_heads; ++h) {
      const std::byte* o = out.data() + (r * call.num_heads + h) * row_bytes;
      row.insert(row.end(), o, o + row_bytes);
      const std::byte* l = lse.data() + (h * call.total_q + r) * 4;
      row.insert(row.end(), l, l + 4);
    }
  }
  return {};
}

::testing::AssertionResult same_bits(const std::vector<std::byte>& a,
                                     const std::vector<std::byte>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " bytes against " << b.size();
  }
  const auto different = std::mismatch(a.begin(), a.end(), b.begin());
  if (different.first == a.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "first difference at byte " << different.first - a.begin() << " of " << a.size();
}

}  // namespace kvtile::testing
