// Sampled rows of a prefill chunk against float64. Kernel error is the engine against the oracle
// over the same decoded bytes; preset error is that oracle against attention over the raw keys and
// values, which are read from the source again, a block at a time. The two are never mixed.
#pragma once

#include <cstdint>
#include <span>

#include "cli/prefill_source.h"
#include "cli/quality.h"
#include "kvtile/attention.h"

namespace kvtile {

struct RowSample {
  int64_t position = 0;
  int head = 0;
};

struct PrefillErrors {
  int64_t rows = 0;
  // Kernel error.
  double max_abs_error = 0;
  double max_error_of_peak = 0;  // output error over the largest visible |value|
  double max_lse_error = 0;      // over max(1, |lse|)
  RelativeError kernel;
  // Preset error.
  RelativeError preset;
  double distance_sum = 0, distance_max = 0;  // total variation of attention distributions
  CosineMean key_cosine;

  double distance_mean() const {
    return rows == 0 ? 0.0 : distance_sum / static_cast<double>(rows);
  }
  void add(const PrefillErrors& other);
};

// Adds `samples`, rows of the one-sequence, finished `call` whose first row is position `begin`, to
// *errors. The cache must still hold what it held during the call.
Status check_rows(const AttentionCall& call, const LayerSource& source, int64_t begin,
                  std::span<const RowSample> samples, int num_threads, PrefillErrors* errors);

}  // namespace kvtile
