// Where and how a call runs: backend, threads, stream; and what it reports back.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtile {

struct RunOptions {
  const char* backend = nullptr;  // a name from backend_name(); null = first row that supports it
  int num_threads = 0;            // CPU; 0 = all. Bits do not depend on it; workspace does.
  void* stream = nullptr;         // CUDA stream
};

struct RunReport {
  const char* backend = nullptr;  // the path taken, e.g. "cpu/avx3"
  size_t workspace_bytes = 0;
  int64_t tile_tokens = 0;  // after rounding
  int num_threads = 0;
};

}  // namespace kvtile
