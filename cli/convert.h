// Rows of a file, whose dtype is a name and whose bytes need not be aligned, as floats. Widening
// is exact.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "kvtile/slot.h"
#include "src/core/float16.h"

namespace kvtile {

inline void widen(const void* data, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const std::byte* words = static_cast<const std::byte*>(data);
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t word = load_half_word(words + 2 * i);
    out[i] = dtype == DType::kFloat16 ? half_to_float(word) : bfloat_to_float(word);
  }
}

// The dtype of a safetensors dtype name; false if there is none.
inline bool dtype_from_name(std::string_view name, DType* dtype) {
  if (name == "F32") {
    *dtype = DType::kFloat32;
  } else if (name == "F16") {
    *dtype = DType::kFloat16;
  } else if (name == "BF16") {
    *dtype = DType::kBFloat16;
  } else {
    return false;
  }
  return true;
}

}  // namespace kvtile
