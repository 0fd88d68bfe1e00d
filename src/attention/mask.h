// Which keys a query position sees: the only place that knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvtile/attention.h"
#include "src/core/hd.h"

namespace kvtile {

struct KeyRange {
  int64_t begin = 0, end = 0;
  KVTILE_HD constexpr bool empty() const { return begin >= end; }
};

// Keys visible from `position` in a sequence of seq_len tokens; empty for a negative position.
KVTILE_HD constexpr KeyRange key_range(const Mask& mask, int64_t position, int64_t seq_len) {
  if (position < 0) return {};
  const int64_t end = mask.causal && position + 1 < seq_len ? position + 1 : seq_len;
  const int64_t begin =
      mask.window > 0 && position + 1 > mask.window ? position + 1 - mask.window : 0;
  return {begin, begin < end ? end : begin};
}

}  // namespace kvtile
