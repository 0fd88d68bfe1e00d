// Calls whose arrays are host memory, on any backend: a CUDA backend gets copies on its device and
// the results come back when the call returns. For checks and small jobs; what runs often keeps its
// arrays on the device.
#pragma once

#include <cstddef>
#include <string_view>

#include "kvtile/attention.h"
#include "kvtile/codec.h"
#include "kvtile/run.h"

namespace kvtile {

// "cuda", "cuda/rows", "cuda/tile", "cuda/hopper".
bool is_cuda_backend(const char* backend);

// The codec's name for a backend: it has no engines to choose from.
RunOptions codec_options(const RunOptions& options);

// Device memory of one allocation; nothing in builds without CUDA.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  DeviceMemory(DeviceMemory&& other) noexcept;

  Status allocate(size_t bytes);
  Status upload(const void* host, size_t bytes, size_t offset = 0);
  Status download(void* host, size_t bytes, size_t offset = 0) const;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

// What an engine's outputs are held to against the oracle: output error over the largest visible
// |value|, lse error over max(1, |lse|). The CPU computes in fp32, CUDA multiplies in fp16;
// rounding to the output's dtype comes on top.
struct EngineBound {
  double output, lse;
};
EngineBound engine_bound(const char* backend, DType dtype);

// Waits until everything queued on the current device is done, and says what went wrong in it.
Status synchronize_device();

Status staged_encode(const EncodeCall& call, const RunOptions& options);
Status staged_decode(const DecodeCall& call, const RunOptions& options);
// On exactly workspace_bytes() of workspace. Contiguous tensors of one sequence or more.
Status staged_attend(const AttentionCall& call, const RunOptions& options);

}  // namespace kvtile
