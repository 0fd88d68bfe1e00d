// Scalar number formats for tests, from and to double, written from the IEEE definition so that no
// table or intrinsic of the library judges itself; and a small seeded generator.
#pragma once

#include <cstdint>

#include "kvtile/slot.h"

namespace kvtile::testing {

// A binary floating-point word of 1 + exponent_bits + mantissa_bits bits. Encoding rounds to
// nearest even and overflows to infinity.
double decode_ieee(uint32_t word, int exponent_bits, int mantissa_bits);
uint32_t encode_ieee(double x, int exponent_bits, int mantissa_bits);

inline double half_to_double(uint16_t word) { return decode_ieee(word, 5, 10); }
inline uint16_t double_to_half(double x) { return static_cast<uint16_t>(encode_ieee(x, 5, 10)); }
inline double bfloat16_to_double(uint16_t word) { return decode_ieee(word, 8, 7); }

// FP8 as the format page defines it: e4m3 (bias 7, 0x7f and 0xff NaN) or e4b15 (bias 15, finite).
double fp8_to_double(uint8_t byte, KeyCode flavour);

// Element `index` of an array of dtype.
double load_element(const void* data, DType dtype, int64_t index);
void store_element(void* data, DType dtype, int64_t index, double x);

// x rounded to dtype; and the distance between neighbouring dtype values at magnitude |x|.
double round_to(DType dtype, double x);
double spacing(DType dtype, double x);

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  double uniform();                            // [0, 1)
  double uniform(double low, double high);     // [low, high)
  int64_t integer(int64_t low, int64_t high);  // [low, high]
  double normal();

 private:
  uint64_t state_;
};

}  // namespace kvtile::testing
