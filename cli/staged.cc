// Staging for CUDA backends. Without CUDA in the build every call goes straight through, and a CUDA
// backend is refused by the library.
#include "cli/staged.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "src/core/device.h"
#include "src/core/status.h"

#if defined(KVTILE_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace kvtile {

bool is_cuda_backend(const char* backend) {
  return backend != nullptr && std::string_view(backend).substr(0, 4) == "cuda";
}

RunOptions codec_options(const RunOptions& options) {
  RunOptions result = options;
  if (is_cuda_backend(options.backend)) result.backend = "cuda";
  return result;
}

EngineBound engine_bound(const char* backend, DType dtype) {
  const double rounding = dtype == DType::kFloat32   ? 0.0
                          : dtype == DType::kFloat16 ? 0x1p-10
                                                     : 0x1p-7;
  if (is_cuda_backend(backend)) return {1.5e-3 + rounding, 4e-3};
  return {std::max(1e-5, rounding), dtype == DType::kFloat32 ? 1e-5 : 1e-3};
}

#if defined(KVTILE_CUDA)

DeviceMemory::~DeviceMemory() { (void)cudaFree(data_); }

Status DeviceMemory::allocate(size_t bytes) {
  void* data = nullptr;
  KVTILE_RETURN_IF_ERROR(cuda_status(fmt::format("device memory, {} bytes", bytes).c_str(),
                                     cudaMalloc(&data, std::max<size_t>(bytes, 1))));
  (void)cudaFree(std::exchange(data_, static_cast<std::byte*>(data)));
  return {};
}

Status DeviceMemory::upload(const void* host, size_t bytes, size_t offset) {
  return cuda_status("copy to the device",
                     cudaMemcpy(data_ + offset, host, bytes, cudaMemcpyHostToDevice));
}

Status DeviceMemory::download(void* host, size_t bytes, size_t offset) const {
  return cuda_status("copy from the device",
                     cudaMemcpy(host, data_ + offset, bytes, cudaMemcpyDeviceToHost));
}

Status synchronize_device() { return cuda_status("device", cudaDeviceSynchronize()); }

#else

namespace {

Status no_device() {
  const DeviceInfo* device;
  return backend_device("cuda", -1, &device);
}

}  // namespace

DeviceMemory::~DeviceMemory() = default;
Status DeviceMemory::allocate(size_t) { return no_device(); }
Status DeviceMemory::upload(const void*, size_t, size_t) { return no_device(); }
Status DeviceMemory::download(void*, size_t, size_t) const { return no_device(); }
Status synchronize_device() { return no_device(); }

#endif

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)) {}

namespace {

// Device copies of a call's arrays, which live until the call is done.
class Stage {
 public:
  // Replaces a host pointer by one to a copy; null stays null.
  template <typename T>
  Status in(T** pointer, int64_t count, int64_t element_bytes = sizeof(T)) {
    if (*pointer == nullptr) return {};
    const auto bytes = static_cast<size_t>(std::max<int64_t>(0, count * element_bytes));
    memory_.emplace_back();
    KVTILE_RETURN_IF_ERROR(memory_.back().allocate(bytes));
    KVTILE_RETURN_IF_ERROR(memory_.back().upload(*pointer, bytes));
    if constexpr (!std::is_const_v<T>) outputs_.push_back({*pointer, memory_.size() - 1, bytes});
    *pointer = reinterpret_cast<T*>(memory_.back().data());
    return {};
  }
  // Everything that was not const, back where it came from.
  Status out() const {
    for (const Output& output : outputs_) {
      KVTILE_RETURN_IF_ERROR(memory_[output.index].download(output.host, output.bytes));
    }
    return {};
  }

 private:
  struct Output {
    void* host;
    size_t index, bytes;
  };
  std::vector<DeviceMemory> memory_;
  std::vector<Output> outputs_;
};

}  // namespace

Status staged_encode(const EncodeCall& original, const RunOptions& options) {
  if (!is_cuda_backend(options.backend)) return encode_slots(original, nullptr, options);
  EncodeCall call = original;
  Stage stage;
  const int64_t row = int64_t{call.cache.num_kv_heads} * call.cache.format.head_dim;
  auto* key = static_cast<const std::byte*>(call.key);
  auto* value = static_cast<const std::byte*>(call.value);
  KVTILE_RETURN_IF_ERROR(stage.in(&key, call.num_tokens * row, dtype_bytes(call.dtype)));
  KVTILE_RETURN_IF_ERROR(stage.in(&value, call.num_tokens * row, dtype_bytes(call.dtype)));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.slot_mapping, call.num_tokens));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.cache.pages, cache_extent_bytes(call.cache)));
  call.key = key;
  call.value = value;
  KVTILE_RETURN_IF_ERROR(encode_slots(call, nullptr, codec_options(options)));
  return stage.out();
}

Status staged_decode(const DecodeCall& original, const RunOptions& options) {
  if (!is_cuda_backend(options.backend)) return decode_slots(original, options);
  DecodeCall call = original;
  Stage stage;
  const int64_t elements = call.num_tokens * call.cache.num_kv_heads * call.cache.format.head_dim;
  auto* key = static_cast<std::byte*>(call.key);
  auto* value = static_cast<std::byte*>(call.value);
  auto* pages = const_cast<const std::byte*>(call.cache.pages);
  KVTILE_RETURN_IF_ERROR(stage.in(&key, elements, dtype_bytes(call.dtype)));
  KVTILE_RETURN_IF_ERROR(stage.in(&value, elements, dtype_bytes(call.dtype)));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.slot_mapping, call.num_tokens));
  KVTILE_RETURN_IF_ERROR(stage.in(&pages, cache_extent_bytes(call.cache)));
  call.key = key;
  call.value = value;
  call.cache.pages = const_cast<std::byte*>(pages);
  KVTILE_RETURN_IF_ERROR(decode_slots(call, codec_options(options)));
  return stage.out();
}

Status staged_attend(const AttentionCall& original, const RunOptions& options) {
  AttentionCall call = original;
  size_t bytes = 0;
  if (!is_cuda_backend(options.backend)) {
    KVTILE_RETURN_IF_ERROR(workspace_bytes(call, options, &bytes));
    std::vector<std::byte> workspace(bytes + 64);
    void* aligned = workspace.data();
    size_t room = workspace.size();
    std::align(64, bytes, aligned, room);
    return attend(call, Workspace{aligned, bytes}, options);
  }
  for (int s = 0; s < call.num_seqs; ++s) {
    call.max_q_len =
        std::max<int64_t>(call.max_q_len, call.cu_seqlens_q[s + 1] - call.cu_seqlens_q[s]);
  }
  KVTILE_RETURN_IF_ERROR(workspace_bytes(call, options, &bytes));
  Stage stage;
  const int64_t head_dim = call.cache.format.head_dim, width = dtype_bytes(call.dtype);
  const int64_t rows = call.total_q * call.num_heads * head_dim;
  const int64_t kv_rows = call.total_q * call.cache.num_kv_heads * head_dim;
  auto* query = static_cast<const std::byte*>(call.query);
  auto* out = static_cast<std::byte*>(call.out);
  auto* key = static_cast<const std::byte*>(call.chunk_key);
  auto* value = static_cast<const std::byte*>(call.chunk_value);
  auto* pages = const_cast<const std::byte*>(call.cache.pages);
  KVTILE_RETURN_IF_ERROR(stage.in(&query, rows, width));
  KVTILE_RETURN_IF_ERROR(stage.in(&out, rows, width));
  KVTILE_RETURN_IF_ERROR(stage.in(&key, kv_rows, width));
  KVTILE_RETURN_IF_ERROR(stage.in(&value, kv_rows, width));
  KVTILE_RETURN_IF_ERROR(stage.in(&pages, cache_extent_bytes(call.cache)));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.lse, call.total_q * call.num_heads));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.sinks, call.num_heads));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.block_table, call.num_seqs * call.max_blocks));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.cu_seqlens_q, call.num_seqs + 1));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.seq_lens, call.num_seqs));
  KVTILE_RETURN_IF_ERROR(stage.in(&call.first_positions, call.num_seqs));
  call.query = query;
  call.out = out;
  call.chunk_key = key;
  call.chunk_value = value;
  call.cache.pages = const_cast<std::byte*>(pages);
  DeviceMemory workspace;
  KVTILE_RETURN_IF_ERROR(workspace.allocate(bytes));
  KVTILE_RETURN_IF_ERROR(attend(call, Workspace{workspace.data(), bytes}, options));
  return stage.out();
}

}  // namespace kvtile
