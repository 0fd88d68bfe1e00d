// Conversions between float and the 16-bit types of captures and golden files: widening is exact,
// narrowing rounds to nearest even. Scalar and plain; nothing here is on a timed path.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "kvtile/slot.h"

namespace kvtile {

inline float bfloat16_to_float(uint16_t word) {
  return std::bit_cast<float>(static_cast<uint32_t>(word) << 16);
}

inline float float16_to_float(uint16_t word) {
  const uint32_t sign = static_cast<uint32_t>(word & 0x8000) << 16;
  const uint32_t exponent = (word >> 10) & 31;
  const uint32_t mantissa = word & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline uint16_t float_to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  // Below the smallest normal the spacing is 2^-24; adding 0.5 lets the FPU round to it.
  if (magnitude < 0x1p-14f) {
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(magnitude + 0.5f) - 0x3f000000);
  }
  const uint32_t rebiased = std::bit_cast<uint32_t>(magnitude) - (112u << 23);
  return sign | static_cast<uint16_t>((rebiased + 0xfff + ((rebiased >> 13) & 1)) >> 13);
}

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// `count` elements of dtype at `data`, which need not be aligned, as floats.
inline void widen(const void* data, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const std::byte* p = static_cast<const std::byte*>(data);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t word;
    std::memcpy(&word, p + 2 * i, sizeof(word));
    out[i] = dtype == DType::kFloat16 ? float16_to_float(word) : bfloat16_to_float(word);
  }
}

// The kvtile dtype of a safetensors dtype name; false if there is none.
inline bool dtype_from_name(std::string_view name, DType* dtype) {
  if (name == "F32")
    *dtype = DType::kFloat32;
  else if (name == "F16")
    *dtype = DType::kFloat16;
  else if (name == "BF16")
    *dtype = DType::kBFloat16;
  else
    return false;
  return true;
}

}  // namespace kvtile
