// CUDA devices through the runtime API. Everything is read lazily and once; a machine without a
// driver is an ordinary case, not an error of the process.
#include "src/core/device.h"

#include "src/core/status.h"

#if defined(KVTILE_CUDA)
#include <cuda_runtime_api.h>

#include <deque>
#include <mutex>
#endif

namespace kvtile {

#if defined(KVTILE_CUDA)
namespace {

// Copy rates measured with the copy of bench/gpu, in GB/s read plus written.
struct MeasuredPart {
  const char* name;
  double copy_gb_per_s;
};
constexpr MeasuredPart kMeasuredParts[] = {
    {"NVIDIA H200", 4300.0},
};

// What a large copy reached of the pins' rate on the measured parts.
constexpr double kCopyShareOfPeak = 0.87;

struct DeviceTable {
  std::mutex mutex;
  bool counted = false;
  int count = 0;
  std::deque<DeviceInfo> devices;  // stable addresses; arch 0 = not read yet
};

DeviceTable& table() {
  static DeviceTable devices;
  return devices;
}

int attribute(cudaDeviceAttr name, int ordinal) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, name, ordinal) == cudaSuccess ? value : 0;
}

Status read_device(int ordinal, DeviceInfo* info) {
  cudaDeviceProp properties;
  KVTILE_RETURN_IF_ERROR(
      cuda_status("device properties", cudaGetDeviceProperties(&properties, ordinal)));
  info->ordinal = ordinal;
  info->name = properties.name;
  info->arch = 10 * properties.major + properties.minor;
  info->num_sms = properties.multiProcessorCount;
  info->shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin);
  info->shared_bytes_per_sm = static_cast<int>(properties.sharedMemPerMultiprocessor);
  info->l2_bytes = properties.l2CacheSize;
  info->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  // Two transfers a clock.
  const double peak_gb_per_s = 2.0 * attribute(cudaDevAttrMemoryClockRate, ordinal) * 1e-6 *
                               attribute(cudaDevAttrGlobalMemoryBusWidth, ordinal) / 8.0;
  info->copy_gb_per_s = kCopyShareOfPeak * peak_gb_per_s;
  for (const MeasuredPart& part : kMeasuredParts) {
    if (info->name != part.name) continue;
    info->copy_gb_per_s = part.copy_gb_per_s;
    info->copy_rate_measured = true;
  }
  return {};
}

// Machine code is built for sm_80 (any 8.x) and sm_90a (9.0 alone); the sm_120 PTX serves 12.0 up.
bool has_code(int arch) { return arch / 10 == 8 || arch == 90 || arch >= 120; }

}  // namespace

int num_devices() {
  DeviceTable& devices = table();
  const std::lock_guard<std::mutex> lock(devices.mutex);
  if (!devices.counted) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
      count = 0;
      (void)cudaGetLastError();
    }
    devices.count = count;
    devices.devices.resize(static_cast<size_t>(count));
    devices.counted = true;
  }
  return devices.count;
}

Status device_info(int ordinal, const DeviceInfo** info) {
  const int count = num_devices();
  if (count == 0) {
    return Status(StatusCode::kUnavailable,
                  "device: got none, wanted a CUDA device and its driver");
  }
  if (ordinal == -1) {
    KVTILE_RETURN_IF_ERROR(cuda_status("current device", cudaGetDevice(&ordinal)));
  }
  if (ordinal < 0 || ordinal >= count) {
    return invalid("device", ordinal, fmt::format("0..{}", count - 1));
  }
  DeviceTable& devices = table();
  const std::lock_guard<std::mutex> lock(devices.mutex);
  DeviceInfo& entry = devices.devices[static_cast<size_t>(ordinal)];
  if (entry.arch == 0) {
    DeviceInfo read;
    KVTILE_RETURN_IF_ERROR(read_device(ordinal, &read));
    entry = read;
  }
  if (!has_code(entry.arch)) {
    return unsupported("device", fmt::format("sm_{} ({})", entry.arch, entry.name),
                       "compute capability 8.x, 9.0 or 12.0 and later");
  }
  *info = &entry;
  return {};
}

CurrentDevice::CurrentDevice(const DeviceInfo& device) {
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current == device.ordinal) return;
  if (cudaSetDevice(device.ordinal) == cudaSuccess) previous_ = current;
}

CurrentDevice::~CurrentDevice() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

Status check_device_pointer(const char* argument, const void* pointer, const DeviceInfo& device) {
  cudaPointerAttributes attributes;
  KVTILE_RETURN_IF_ERROR(
      cuda_status("pointer attributes", cudaPointerGetAttributes(&attributes, pointer)));
  const std::string wanted = fmt::format("memory of device {}", device.ordinal);
  switch (attributes.type) {
    case cudaMemoryTypeManaged:
      return {};
    case cudaMemoryTypeDevice:
      if (attributes.device == device.ordinal) return {};
      return invalid(argument, fmt::format("memory of device {}", attributes.device), wanted);
    default:
      return invalid(argument, "host memory", wanted);
  }
}

Status check_stream(void* stream, const DeviceInfo& device) {
  if (stream == nullptr) return {};
  auto* handle = static_cast<cudaStream_t>(stream);
  // A stream under capture cannot be asked for its device; a launch into the wrong one fails.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  KVTILE_RETURN_IF_ERROR(cuda_status("stream", cudaStreamIsCapturing(handle, &capture)));
  if (capture != cudaStreamCaptureStatusNone) return {};
  int ordinal = -1;
  KVTILE_RETURN_IF_ERROR(cuda_status("stream", cudaStreamGetDevice(handle, &ordinal)));
  if (ordinal == device.ordinal) return {};
  return invalid("stream", fmt::format("a stream of device {}", ordinal),
                 fmt::format("device {}", device.ordinal));
}

Status cuda_status(const char* what, int cuda_error) {
  const auto error = static_cast<cudaError_t>(cuda_error);
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return Status(StatusCode::kUnavailable,
                fmt::format("{}: got {} ({}), wanted success", what, cudaGetErrorName(error),
                            cudaGetErrorString(error)));
}

#else  // no CUDA in this build

int num_devices() { return 0; }

Status device_info(int, const DeviceInfo**) {
  return Status(StatusCode::kUnavailable,
                "device: got a build without CUDA, wanted one with KVTILE_CUDA=ON");
}

CurrentDevice::CurrentDevice(const DeviceInfo&) {}
CurrentDevice::~CurrentDevice() = default;
Status check_device_pointer(const char*, const void*, const DeviceInfo&) { return {}; }
Status check_stream(void*, const DeviceInfo&) { return {}; }
Status cuda_status(const char*, int) { return {}; }

#endif

Status backend_device(std::string_view backend, int ordinal, const DeviceInfo** info) {
  if (num_devices() > 0) return device_info(ordinal, info);
#if defined(KVTILE_CUDA)
  constexpr const char* kMissing = "no CUDA device on this machine";
#else
  constexpr const char* kMissing = "no CUDA in this build";
#endif
  return Status(StatusCode::kUnavailable,
                fmt::format("backend: got {}, wanted cpu: {}", backend, kMissing));
}

}  // namespace kvtile
