// Distances between attention distributions, keys and outputs, in float64.
#include "cli/quality.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvtile {
namespace {

double log_sum_exp(std::span<const double> scores) {
  const double peak = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double s : scores) sum += std::exp(s - peak);
  return peak + std::log(sum);
}

}  // namespace

double total_variation(std::span<const double> a, std::span<const double> b) {
  if (a.empty()) return 0;
  const double lse_a = log_sum_exp(a), lse_b = log_sum_exp(b);
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i)
    sum += std::fabs(std::exp(a[i] - lse_a) - std::exp(b[i] - lse_b));
  return 0.5 * sum;
}

void CosineMean::add(std::span<const float> a, std::span<const float> b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    ab += x * y;
    aa += x * x;
    bb += y * y;
  }
  if (aa == 0 || bb == 0) return;
  sum_ += ab / std::sqrt(aa * bb);
  ++count_;
}

double RelativeError::value() const {
  if (reference_ > 0) return std::sqrt(error_ / reference_);
  return error_ == 0 ? 0.0 : std::numeric_limits<double>::infinity();
}

}  // namespace kvtile
