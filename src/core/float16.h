// Scalar fp16 and bf16 conversions by integer arithmetic: exact for every input, independent of the
// host's rounding and denormal modes. Narrowing rounds to nearest even; NaN stays NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kvtile/slot.h"

namespace kvtile {

inline constexpr uint16_t kHalfNaN = 0x7E00;
inline constexpr float kHalfMax = 65504.0f;

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1F;
  uint32_t mantissa = half & 0x3FFu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
  if (mantissa == 0) return std::bit_cast<float>(sign);
  const int shift = std::countl_zero(mantissa) - 21;  // brings the leading one to bit 10
  mantissa = (mantissa << shift) & 0x3FFu;
  return std::bit_cast<float>(sign | (static_cast<uint32_t>(113 - shift) << 23) | (mantissa << 13));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | kHalfNaN);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds past 65504
  if (magnitude < 0x33000001u) return sign;                                    // <= 2^-25
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  // Normal halves keep 11 significant bits, subnormal ones fewer.
  const int drop = exponent >= -14 ? 13 : 13 + (-14 - exponent);
  const uint32_t kept = mantissa >> drop;
  const uint32_t rest = mantissa & ((1u << drop) - 1);
  const uint32_t half_way = 1u << (drop - 1);
  const uint32_t up = rest > half_way || (rest == half_way && (kept & 1)) ? 1 : 0;
  // A carry out of the mantissa moves into the exponent field by itself.
  const uint32_t base = exponent >= -14 ? static_cast<uint32_t>(exponent + 14) << 10 : 0;
  return static_cast<uint16_t>(sign | (base + kept + up));
}

inline float bfloat_to_float(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

inline float load_element(const void* base, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(base)[index];
  const uint16_t word = static_cast<const uint16_t*>(base)[index];
  return dtype == DType::kFloat16 ? half_to_float(word) : bfloat_to_float(word);
}

inline void store_element(void* base, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] =
        dtype == DType::kFloat16 ? float_to_half(value) : float_to_bfloat(value);
  }
}

// Address of element `index` of an array of dtype.
inline const std::byte* element_ptr(const void* base, int64_t index, DType dtype) {
  return static_cast<const std::byte*>(base) + index * dtype_bytes(dtype);
}

inline uint16_t load_half_word(const std::byte* p) {
  uint16_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

inline void store_half_word(std::byte* p, uint16_t word) { std::memcpy(p, &word, sizeof(word)); }

}  // namespace kvtile
