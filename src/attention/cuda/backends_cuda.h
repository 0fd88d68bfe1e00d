// The CUDA rows of the backend table. They are part of every build; without CUDA, or on a machine
// without a device, they answer kUnavailable.
#pragma once

#include "src/attention/backends.h"

namespace kvtile {

extern const Backend kCudaRowsBackend;
extern const Backend kCudaTileBackend;

}  // namespace kvtile
