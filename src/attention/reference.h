// The oracle: float64 attention over the decoded bytes, one (row, head) at a time, as plain as can
// be. It has its own unpacker and shares no code with the engine (SlotFormat offsets apart).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvtile/attention.h"
#include "kvtile/slot.h"

namespace kvtile {

// Exact decoded values of one slot. key: [head_dim], Hadamard space for rotated formats; value:
// [head_dim]. Either may be null.
void reference_decode_slot(const SlotFormat& format, const std::byte* slot, double* key,
                           double* value);

// In-place orthonormal Sylvester Hadamard transform (its own inverse); n is a power of two.
void reference_hadamard(double* x, int n);

// One row of attend(): out [head_dim], lse. `row` counts in [0, total_q). Reads host memory only.
void reference_attend_row(const AttentionCall& call, int64_t row, int head, double* out,
                          double* lse);

}  // namespace kvtile
