// The CPU codec's per-target entry points.
#pragma once

#include <cstdint>

#include "kvtile/codec.h"
#include "src/core/cpu.h"

namespace kvtile {

struct CodecKernels {
  // Tokens [begin, end) of a validated call; adds to *report.
  void (*encode)(const EncodeCall& call, int64_t begin, int64_t end, EncodeReport* report);
  // Tokens [begin, end); scratch holds decode_scratch_floats(head_dim).
  void (*decode)(const DecodeCall& call, int64_t begin, int64_t end, float* scratch);
};

CodecKernels codec_kernels(SimdTarget target);

int64_t decode_scratch_floats(int head_dim);

}  // namespace kvtile
