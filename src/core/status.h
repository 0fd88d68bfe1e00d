// How Status messages are written: "argument: got X, wanted Y".
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "kvtile/status.h"

namespace kvtile {

template <typename T>
Status invalid(std::string_view argument, const T& got, std::string_view wanted) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{}: got {}, wanted {}", argument, got, wanted));
}

template <typename T>
Status unsupported(std::string_view argument, const T& got, std::string_view wanted) {
  return Status(StatusCode::kUnsupported,
                fmt::format("{}: got {}, wanted {}", argument, got, wanted));
}

}  // namespace kvtile

// Returns from the enclosing function when `expr` is not Ok.
#define KVTILE_RETURN_IF_ERROR(expr)                                      \
  do {                                                                    \
    if (::kvtile::Status status_ = (expr); !status_.ok()) return status_; \
  } while (0)
