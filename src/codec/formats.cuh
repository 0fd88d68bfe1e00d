// From a run-time SlotFormat to the compile-time one its kernels are instantiated for. (No fmt
// here: device compilations do not digest it.)
#pragma once

#include <string>
#include <type_traits>

#include "kvtile/slot.h"

namespace kvtile::cuda {

// Calls body(key code, value code, head_dim), each an integral constant. Norm correction is a
// run-time value everywhere.
template <class Body>
Status for_format(const SlotFormat& format, Body&& body) {
  const auto with_dim = [&](auto key, auto value) -> Status {
    switch (format.head_dim) {
      case 64:
        body(key, value, std::integral_constant<int, 64>());
        return {};
      case 128:
        body(key, value, std::integral_constant<int, 128>());
        return {};
      case 256:
        body(key, value, std::integral_constant<int, 256>());
        return {};
      default:
        return Status(StatusCode::kUnsupported, "head_dim: got " + std::to_string(format.head_dim) +
                                                    ", wanted 64, 128 or 256 on backend cuda");
    }
  };
  using U4 = std::integral_constant<ValueCode, ValueCode::kUniform4>;
  using U3 = std::integral_constant<ValueCode, ValueCode::kUniform3>;
  switch (format.key) {
    case KeyCode::kFp8E4M3:
      return with_dim(std::integral_constant<KeyCode, KeyCode::kFp8E4M3>(), U4());
    case KeyCode::kFp8E4B15:
      return with_dim(std::integral_constant<KeyCode, KeyCode::kFp8E4B15>(), U4());
    case KeyCode::kLloydMax4:
      return with_dim(std::integral_constant<KeyCode, KeyCode::kLloydMax4>(), U4());
    case KeyCode::kLloydMax3:
      if (format.value == ValueCode::kUniform3) {
        return with_dim(std::integral_constant<KeyCode, KeyCode::kLloydMax3>(), U3());
      }
      return with_dim(std::integral_constant<KeyCode, KeyCode::kLloydMax3>(), U4());
  }
  return Status(StatusCode::kInvalidArgument,
                "key code: got " + std::to_string(static_cast<int>(format.key)) + ", wanted 0..3");
}

}  // namespace kvtile::cuda
