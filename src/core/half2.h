// fp16 and bf16 as bit patterns, and packed fp16 pairs in a uint32_t (low half first), on host and
// device alike. On the device each function is one instruction or a short fixed sequence; the host
// text is an exact emulation, so that the CPU tests run the very code of the kernels. Every
// operation rounds to nearest even, once; subnormals are kept; NaN payloads may differ.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "src/core/float16.h"
#include "src/core/hd.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace kvtile {

KVTILE_HD inline uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return std::bit_cast<uint32_t>(x);
#endif
}

KVTILE_HD inline float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

namespace emulate {

// Rounds a double that is either exact or rounded to odd at 53 bits: one rounding in all.
inline uint16_t double_to_half(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (magnitude >= 65520.0) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude == 0.0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int ulp =
      exponent - 11 < -24 ? -24 : exponent - 11;  // exponent of the unit in the last place
  const double units = std::nearbyint(std::ldexp(magnitude, -ulp));
  const double rounded = std::ldexp(units, ulp);
  if (rounded < 0x1p-14) {
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(rounded * 0x1p24));
  }
  std::frexp(rounded, &exponent);
  const auto mantissa = static_cast<uint16_t>(std::ldexp(rounded, 11 - exponent) - 1024.0);
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) | mantissa);
}

// a * b + c with one rounding: the product of two halves is exact in double; the sum is rounded to
// odd there, which keeps the final rounding correct.
inline uint16_t half_fma(uint16_t a, uint16_t b, uint16_t c) {
  const double product = static_cast<double>(half_to_float(a)) * half_to_float(b);
  const double addend = half_to_float(c);
  double sum = product + addend;
  if (std::isfinite(sum)) {
    const double shadow = sum - product;
    const double error = (product - (sum - shadow)) + (addend - shadow);
    auto bits = std::bit_cast<uint64_t>(sum);
    if (error != 0.0 && (bits & 1) == 0) {
      bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
      sum = std::bit_cast<double>(bits);
    }
  }
  return double_to_half(sum);
}

}  // namespace emulate

KVTILE_HD inline float half_bits_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  return half_to_float(half);
#endif
}

KVTILE_HD inline uint16_t float_to_half_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(x));
#else
  return float_to_half(x);
#endif
}

KVTILE_HD inline float bfloat_bits_to_float(uint16_t word) {
  return bits_float(static_cast<uint32_t>(word) << 16);
}

KVTILE_HD inline uint16_t float_to_bfloat_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  return float_to_bfloat(x);
#endif
}

#if defined(__CUDACC__)
namespace device_half {
__device__ inline __half2 as_half2(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }
__device__ inline uint32_t as_bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
}  // namespace device_half
#endif

KVTILE_HD constexpr uint32_t half2_broadcast(uint16_t half) { return half * 0x00010001u; }

// {low, high} rounded to fp16.
KVTILE_HD inline uint32_t half2_from_floats(float low, float high) {
#if defined(__CUDA_ARCH__)
  return device_half::as_bits(__floats2half2_rn(low, high));
#else
  return float_to_half_bits(low) | (static_cast<uint32_t>(float_to_half_bits(high)) << 16);
#endif
}

KVTILE_HD inline uint32_t bfloat162_from_floats(float low, float high) {
#if defined(__CUDA_ARCH__)
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
#else
  return float_to_bfloat_bits(low) | (static_cast<uint32_t>(float_to_bfloat_bits(high)) << 16);
#endif
}

KVTILE_HD inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  using namespace device_half;
  return as_bits(__hfma2(as_half2(a), as_half2(b), as_half2(c)));
#else
  const auto low = emulate::half_fma(static_cast<uint16_t>(a), static_cast<uint16_t>(b),
                                     static_cast<uint16_t>(c));
  const auto high =
      emulate::half_fma(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16),
                        static_cast<uint16_t>(c >> 16));
  return low | (static_cast<uint32_t>(high) << 16);
#endif
}

// The rounding forms are never contracted with a neighbour.
KVTILE_HD inline uint32_t half2_mul(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  using namespace device_half;
  return as_bits(__hmul2_rn(as_half2(a), as_half2(b)));
#else
  return half2_fma(a, b, 0x80008000u);  // -0 keeps the sign of a zero product
#endif
}

KVTILE_HD inline uint32_t half2_add(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  using namespace device_half;
  return as_bits(__hadd2_rn(as_half2(a), as_half2(b)));
#else
  return half2_fma(a, half2_broadcast(0x3c00), b);
#endif
}

}  // namespace kvtile
