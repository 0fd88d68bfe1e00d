// Where and how a call runs: backend, threads, stream; and what it reports back.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtile {

struct RunOptions {
  // A name from backend_name() or "cpu/<SIMD target>"; null = "cpu", since arrays are then host
  // memory. No pointer is ever looked at to choose.
  const char* backend = nullptr;
  int num_threads = 0;     // CPU; 0 = all. Bits do not depend on it; workspace does.
  void* stream = nullptr;  // CUDA: the stream everything is queued on; null = the default one
  int device = -1;         // CUDA: ordinal; -1 = the calling thread's current device
};

struct RunReport {
  const char* backend = nullptr;  // the path taken, e.g. "cpu/avx3" or "cuda/rows"
  size_t workspace_bytes = 0;
  int64_t tile_tokens = 0;  // after rounding
  int num_threads = 0;
};

}  // namespace kvtile
