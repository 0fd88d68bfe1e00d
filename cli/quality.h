// Preset error: what packing changed, apart from what the kernel computes. The quality number is
// the total variation distance between the attention distributions over decoded and over raw keys,
// because it is the distribution that the model sees; the cosine of decoded and raw keys is kept as
// a side note only, since it does not predict quality.
#pragma once

#include <cstdint>
#include <span>

namespace kvtile {

// 0.5 * sum |softmax(a) - softmax(b)|, in [0, 1], for scores of the same keys.
double total_variation(std::span<const double> a, std::span<const double> b);

// Mean cosine of pairs of rows; pairs with a zero row are left out.
class CosineMean {
 public:
  void add(std::span<const float> a, std::span<const float> b);
  void add(const CosineMean& other) {
    sum_ += other.sum_;
    count_ += other.count_;
  }
  double mean() const { return count_ == 0 ? 1.0 : sum_ / static_cast<double>(count_); }

 private:
  double sum_ = 0;
  int64_t count_ = 0;
};

// sqrt(sum (x - y)^2 / sum y^2) over everything added.
class RelativeError {
 public:
  void add(double x, double y) {
    error_ += (x - y) * (x - y);
    reference_ += y * y;
  }
  void add(const RelativeError& other) {
    error_ += other.error_;
    reference_ += other.reference_;
  }
  double value() const;

 private:
  double error_ = 0, reference_ = 0;
};

}  // namespace kvtile
