// What the library knows of a CUDA device: read once per device, then constant. Facts the driver
// does not report (the copy rate) come from a table of parts; a part it does not list falls back to
// what its memory clock and bus width say. Without a CUDA build, a driver or a device:
// kUnavailable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvtile/status.h"

namespace kvtile {

struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  int arch = 0;  // 10 * major + minor, e.g. 90
  int num_sms = 0;
  int shared_bytes_per_block = 0;  // the opt-in maximum of one block
  int shared_bytes_per_sm = 0;
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  double copy_gb_per_s = 0.0;  // device-to-device copy, bytes read plus bytes written
  bool copy_rate_measured = false;
};

// Devices this process sees; 0 without a CUDA build, driver or device.
int num_devices();

// Valid for the life of the process. `ordinal` -1 is the calling thread's current device.
// kUnsupported for an architecture this build has no code for.
Status device_info(int ordinal, const DeviceInfo** info);

// device_info() for a call that asked for `backend`: where there is no device at all, kUnavailable
// names the backend and what is missing.
Status backend_device(std::string_view backend, int ordinal, const DeviceInfo** info);

// Makes a device the calling thread's current one for its own lifetime: launches go there.
class CurrentDevice {
 public:
  explicit CurrentDevice(const DeviceInfo& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = -1;  // -1: it was current already
};

// Ok if a kernel on the device can read `pointer`: its own or managed memory. Host memory and
// another device's are kInvalidArgument naming the argument. Null is the caller's to judge.
Status check_device_pointer(const char* argument, const void* pointer, const DeviceInfo& device);

// A stream of the device; null is the device's default stream.
Status check_stream(void* stream, const DeviceInfo& device);

// Ok, or kUnavailable with the CUDA error's name, for a cudaError_t; clears a launch error.
Status cuda_status(const char* what, int cuda_error);

}  // namespace kvtile
