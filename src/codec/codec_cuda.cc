// Host side of the CUDA codec: refuses what the kernels cannot do, before anything is launched, and
// cuts a call into launches whose item count fits 31 bits.
#include "src/codec/codec_cuda.h"

#include <algorithm>
#include <cmath>

#include "src/core/device.h"
#include "src/core/status.h"

namespace kvtile {

#if defined(KVTILE_CUDA)
namespace {

constexpr int64_t kItemsPerLaunch = int64_t{1} << 30;

// Rows are moved 16 bytes at a time.
Status check_aligned(const char* name, const void* base, int64_t stride_token, int64_t stride_head,
                     int element_bytes) {
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0 || stride_token * element_bytes % 16 != 0 ||
      stride_head * element_bytes % 16 != 0) {
    return unsupported(name,
                       fmt::format("address {} and strides of {} and {} bytes", base,
                                   stride_token * element_bytes, stride_head * element_bytes),
                       "multiples of 16 bytes on backend cuda");
  }
  return {};
}

Status check_head_dim(const SlotFormat& format) {
  if (format.head_dim == 64 || format.head_dim == 128 || format.head_dim == 256) return {};
  return unsupported("head_dim", format.head_dim, "64, 128 or 256 on backend cuda");
}

float inverse_root(int head_dim) { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }

// Everything both directions share: device, stream, pool and slot_mapping.
Status check_call(const PagedCache& cache, const int64_t* slot_mapping, int64_t num_tokens,
                  const RunOptions& options, const DeviceInfo** device) {
  KVTILE_RETURN_IF_ERROR(backend_device("cuda", options.device, device));
  KVTILE_RETURN_IF_ERROR(check_head_dim(cache.format));
  KVTILE_RETURN_IF_ERROR(cuda::check_word_cache(cache, "cuda"));
  KVTILE_RETURN_IF_ERROR(check_stream(options.stream, **device));
  if (num_tokens == 0) return {};
  if (slot_mapping == nullptr) return invalid("slot_mapping", "null", "[num_tokens] slots");
  KVTILE_RETURN_IF_ERROR(check_device_pointer("slot_mapping", slot_mapping, **device));
  if (cache.num_blocks > 0) {
    KVTILE_RETURN_IF_ERROR(check_device_pointer("pages", cache.pages, **device));
  }
  return {};
}

}  // namespace

Status encode_slots_cuda(const EncodeCall& call, const EncodeReport* report,
                         const RunOptions& options) {
  const DeviceInfo* device = nullptr;
  KVTILE_RETURN_IF_ERROR(
      check_call(call.cache, call.slot_mapping, call.num_tokens, options, &device));
  if (report != nullptr) {
    return unsupported("report", "a pointer", "null on backend cuda: counters need a read back");
  }
  if (call.checked) {
    return unsupported("checked", true, "false on backend cuda: a refusal needs a read back");
  }
  if (call.num_tokens == 0) return {};
  KVTILE_RETURN_IF_ERROR(check_device_pointer("key", call.key, *device));
  KVTILE_RETURN_IF_ERROR(check_device_pointer("value", call.value, *device));
  const int bytes = dtype_bytes(call.dtype);
  KVTILE_RETURN_IF_ERROR(
      check_aligned("key", call.key, call.key_stride_token, call.key_stride_head, bytes));
  KVTILE_RETURN_IF_ERROR(
      check_aligned("value", call.value, call.value_stride_token, call.value_stride_head, bytes));

  const SlotFormat& format = call.cache.format;
  cuda::EncodeParams params;
  params.cache = cuda::make_cache_params(call.cache);
  params.key_stride_token = call.key_stride_token * bytes;
  params.key_stride_head = call.key_stride_head * bytes;
  params.value_stride_token = call.value_stride_token * bytes;
  params.value_stride_head = call.value_stride_head * bytes;
  params.head_divisor = cuda::FastDivisor(static_cast<uint32_t>(call.cache.num_kv_heads));
  params.inverse_root_dim = inverse_root(format.head_dim);
  params.bfloat16 = call.dtype == DType::kBFloat16;
  params.early_launch = device->arch >= 90;
  if (format.rotated()) {
    params.slope = cell_slope(format.head_dim);
    params.cells = make_cell_table(make_codebook(format.key, format.head_dim), params.slope);
  }
  const CurrentDevice current(*device);
  const int64_t step = std::max<int64_t>(1, kItemsPerLaunch / call.cache.num_kv_heads);
  for (int64_t first = 0; first < call.num_tokens; first += step) {
    const int64_t tokens = std::min(step, call.num_tokens - first);
    params.key = static_cast<const std::byte*>(call.key) + first * params.key_stride_token;
    params.value = static_cast<const std::byte*>(call.value) + first * params.value_stride_token;
    params.slot_mapping = call.slot_mapping + first;
    params.num_items = static_cast<uint32_t>(tokens * call.cache.num_kv_heads);
    KVTILE_RETURN_IF_ERROR(cuda::launch_encode(format, call.dtype, params, options.stream));
  }
  return {};
}

Status decode_slots_cuda(const DecodeCall& call, const RunOptions& options) {
  const DeviceInfo* device = nullptr;
  KVTILE_RETURN_IF_ERROR(
      check_call(call.cache, call.slot_mapping, call.num_tokens, options, &device));
  if (call.num_tokens == 0 || (call.key == nullptr && call.value == nullptr)) return {};
  const SlotFormat& format = call.cache.format;
  for (auto [name, array] : {std::pair{"key", call.key}, std::pair{"value", call.value}}) {
    if (array == nullptr) continue;
    KVTILE_RETURN_IF_ERROR(check_device_pointer(name, array, *device));
    KVTILE_RETURN_IF_ERROR(check_aligned(name, array, 0, 0, 1));
  }
  cuda::DecodeParams params;
  params.cache = cuda::make_cache_params(call.cache);
  params.head_divisor = cuda::FastDivisor(static_cast<uint32_t>(call.cache.num_kv_heads));
  params.levels = cuda::make_decode_levels(format);
  params.inverse_root_dim = inverse_root(format.head_dim);
  params.dtype = call.dtype;
  params.norm_correction = format.norm_correction;
  const int64_t row_bytes =
      int64_t{call.cache.num_kv_heads} * format.head_dim * dtype_bytes(call.dtype);
  const CurrentDevice current(*device);
  const int64_t step = std::max<int64_t>(1, kItemsPerLaunch / call.cache.num_kv_heads);
  for (int64_t first = 0; first < call.num_tokens; first += step) {
    const int64_t tokens = std::min(step, call.num_tokens - first);
    const auto at = [&](void* array) {
      return array == nullptr ? nullptr : static_cast<std::byte*>(array) + first * row_bytes;
    };
    params.key = at(call.key);
    params.value = at(call.value);
    params.slot_mapping = call.slot_mapping + first;
    params.num_items = static_cast<uint32_t>(tokens * call.cache.num_kv_heads);
    KVTILE_RETURN_IF_ERROR(cuda::launch_decode(format, params, call.unrotate_keys, options.stream));
  }
  return {};
}

#else  // no CUDA in this build

Status encode_slots_cuda(const EncodeCall&, const EncodeReport*, const RunOptions& options) {
  const DeviceInfo* device = nullptr;
  return backend_device("cuda", options.device, &device);
}

Status decode_slots_cuda(const DecodeCall&, const RunOptions& options) {
  const DeviceInfo* device = nullptr;
  return backend_device("cuda", options.device, &device);
}

#endif

}  // namespace kvtile
