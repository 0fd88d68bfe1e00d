// Scalar number formats and the seeded generator.
#include "tests/testing/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

namespace kvtile::testing {
namespace {

struct Widths {
  int exponent_bits, mantissa_bits;
};

Widths widths(DType dtype) {
  if (dtype == DType::kFloat16) return {5, 10};
  if (dtype == DType::kBFloat16) return {8, 7};
  return {8, 23};
}

}  // namespace

double decode_ieee(uint32_t word, int exponent_bits, int mantissa_bits) {
  const int all_ones = (1 << exponent_bits) - 1;
  const int bias = all_ones >> 1;
  const int exponent = static_cast<int>(word >> mantissa_bits) & all_ones;
  const uint32_t mantissa = word & ((1u << mantissa_bits) - 1);
  const bool negative = ((word >> (exponent_bits + mantissa_bits)) & 1) != 0;
  double magnitude;
  if (exponent == all_ones) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else {
    const uint32_t hidden = exponent == 0 ? 0 : 1u << mantissa_bits;
    magnitude = std::ldexp(static_cast<double>(mantissa + hidden),
                           std::max(exponent, 1) - bias - mantissa_bits);
  }
  return negative ? -magnitude : magnitude;
}

uint32_t encode_ieee(double x, int exponent_bits, int mantissa_bits) {
  const uint32_t sign = std::signbit(x) ? 1u << (exponent_bits + mantissa_bits) : 0;
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(x)) return sign | infinity | 1u << (mantissa_bits - 1);
  if (std::isinf(x)) return sign | infinity;
  if (x == 0) return sign;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  // Units of the last place: mantissa and exponent fields are one integer, so a carry out of the
  // mantissa moves to the next exponent by itself.
  const int exponent = std::max(std::ilogb(x), 1 - bias);
  const double units = std::nearbyint(std::ldexp(std::fabs(x), mantissa_bits - exponent));
  const uint64_t word =
      (static_cast<uint64_t>(exponent + bias - 1) << mantissa_bits) + static_cast<uint64_t>(units);
  return sign | (word >= infinity ? infinity : static_cast<uint32_t>(word));
}

double fp8_to_double(uint8_t byte, KeyCode flavour) {
  const bool e4m3 = flavour == KeyCode::kFp8E4M3;
  if (e4m3 && (byte & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  const double magnitude =
      std::ldexp(mantissa + (exponent == 0 ? 0 : 8), std::max(exponent, 1) - (e4m3 ? 7 : 15) - 3);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

double load_element(const void* data, DType dtype, int64_t index) {
  const auto* bytes = static_cast<const std::byte*>(data) + index * dtype_bytes(dtype);
  uint32_t word = 0;
  std::memcpy(&word, bytes, static_cast<size_t>(dtype_bytes(dtype)));
  return decode_ieee(word, widths(dtype).exponent_bits, widths(dtype).mantissa_bits);
}

void store_element(void* data, DType dtype, int64_t index, double x) {
  const uint32_t word = encode_ieee(x, widths(dtype).exponent_bits, widths(dtype).mantissa_bits);
  std::memcpy(static_cast<std::byte*>(data) + index * dtype_bytes(dtype), &word,
              static_cast<size_t>(dtype_bytes(dtype)));
}

double round_to(DType dtype, double x) {
  const Widths w = widths(dtype);
  return decode_ieee(encode_ieee(x, w.exponent_bits, w.mantissa_bits), w.exponent_bits,
                     w.mantissa_bits);
}

double spacing(DType dtype, double x) {
  const Widths w = widths(dtype);
  const int min_exponent = 2 - (1 << (w.exponent_bits - 1));
  const int exponent = x == 0 || !std::isfinite(x) ? min_exponent : std::ilogb(x);
  return std::ldexp(1.0, std::max(exponent, min_exponent) - w.mantissa_bits);
}

uint64_t Random::bits() {
  // SplitMix64: a counter through a fixed mixing function.
  uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::uniform(double low, double high) { return low + (high - low) * uniform(); }

int64_t Random::integer(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
}

double Random::normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

}  // namespace kvtile::testing
