// The one check of a dtype that came from outside as a number.
#pragma once

#include "kvtile/slot.h"
#include "src/core/status.h"

namespace kvtile {

inline Status to_dtype(int value, DType* dtype) {
  if (value < 0 || value > static_cast<int>(DType::kBFloat16)) {
    return invalid("dtype", value, "0 (float32), 1 (float16) or 2 (bfloat16)");
  }
  *dtype = static_cast<DType>(value);
  return {};
}

inline Status check_dtype(DType dtype) { return to_dtype(static_cast<int>(dtype), &dtype); }

}  // namespace kvtile
