// The frozen codebook: Lloyd-Max for a normal distribution, scaled by 1/sqrt(head_dim) exactly.
#include "src/codec/codebook.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace kvtile {
namespace {

constexpr KeyCode kCodes[] = {KeyCode::kLloydMax4, KeyCode::kLloydMax3};

double density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi); }
double mass(double a, double b) {
  return 0.5 * (std::erf(b / std::numbers::sqrt2) - std::erf(a / std::numbers::sqrt2));
}

TEST(Codebook, LevelsAreCentroidsOfTheirCellsForEveryHeadDim) {
  for (KeyCode code : kCodes) {
    for (int head_dim : {32, 64, 128, 256, 512}) {
      const Codebook book = make_codebook(code, head_dim);
      const double sigma = 1.0 / std::sqrt(head_dim);
      ASSERT_EQ(book.num_levels, 1 << key_bits(code));
      for (int i = 0; i < book.num_levels; ++i) {
        const double low = i == 0 ? -40.0 : book.bounds[i - 1] / sigma;
        const double high = i == book.num_levels - 1 ? 40.0 : book.bounds[i] / sigma;
        const double centroid = (density(low) - density(high)) / mass(low, high);
        EXPECT_NEAR(book.levels[i] / sigma, centroid, 2e-3) << head_dim << " level " << i;
      }
    }
  }
}

TEST(Codebook, BoundsAreMidpointsAscendingAndSymmetric) {
  for (KeyCode code : kCodes) {
    for (int head_dim : {32, 64, 128, 256, 512}) {
      const Codebook book = make_codebook(code, head_dim);
      const int n = book.num_levels;
      for (int i = 0; i + 1 < n; ++i) {
        EXPECT_LT(book.levels[i], book.bounds[i]);
        EXPECT_LT(book.bounds[i], book.levels[i + 1]);
        EXPECT_NEAR(book.bounds[i], (book.levels[i] + book.levels[i + 1]) / 2,
                    1e-6 / std::sqrt(head_dim));
        EXPECT_EQ(book.bounds[i], -book.bounds[n - 2 - i]);
        EXPECT_EQ(book.levels[i], -book.levels[n - 1 - i]);
      }
      EXPECT_EQ(book.bounds[n / 2 - 1], 0.0f);
    }
  }
}

TEST(Codebook, HalvingSigmaIsExact) {
  for (KeyCode code : kCodes) {
    for (int head_dim : {32, 64, 128}) {
      const Codebook wide = make_codebook(code, head_dim);
      const Codebook narrow = make_codebook(code, 4 * head_dim);
      for (int i = 0; i < 16; ++i) EXPECT_EQ(wide.levels[i], 2 * narrow.levels[i]);
      for (int i = 0; i + 1 < wide.num_levels; ++i) EXPECT_EQ(wide.bounds[i], 2 * narrow.bounds[i]);
    }
  }
}

TEST(Codebook, ThreeBitLookupsIgnoreTheFourthBit) {
  const Codebook book = make_codebook(KeyCode::kLloydMax3, 128);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(book.levels[i], book.levels[i + 8]);
}

}  // namespace
}  // namespace kvtile
