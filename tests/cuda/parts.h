// Made-up devices, for tests that ask no driver.
#pragma once

#include "src/core/device.h"

namespace kvtile::testing {

inline DeviceInfo h200() {
  DeviceInfo device;
  device.name = "NVIDIA H200";
  device.arch = 90;
  device.num_sms = 132;
  device.shared_bytes_per_block = 232448;
  device.shared_bytes_per_sm = 233472;
  device.copy_gb_per_s = 4300.0;
  return device;
}

// A smaller part: 99 KB a block, as on sm_86, sm_89 and sm_120.
inline DeviceInfo small_part() {
  DeviceInfo device = h200();
  device.arch = 89;
  device.num_sms = 46;
  device.shared_bytes_per_block = 101376;
  device.shared_bytes_per_sm = 102400;
  device.copy_gb_per_s = 500.0;
  return device;
}

}  // namespace kvtile::testing
