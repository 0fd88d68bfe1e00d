// The CUDA codec behind encode_slots() and decode_slots(): backend "cuda". Calls arrive with what
// the host can see already validated and strides resolved; lengths and slots are device memory.
#pragma once

#include "kvtile/codec.h"
#include "kvtile/run.h"
#include "kvtile/status.h"
#include "src/codec/codec_params.h"

namespace kvtile {

// Launch only: no allocation, no synchronisation, nothing read back. kUnsupported for what needs a
// read back (report, checked) or has no kernel (head_dim); kUnavailable without a device.
Status encode_slots_cuda(const EncodeCall& call, const EncodeReport* report,
                         const RunOptions& options);
Status decode_slots_cuda(const DecodeCall& call, const RunOptions& options);

namespace cuda {

// One launch each; `stream` is a cudaStream_t. Ok, or what the launch reported.
Status launch_encode(const SlotFormat& format, DType dtype, const EncodeParams& params,
                     void* stream);
Status launch_decode(const SlotFormat& format, const DecodeParams& params, bool unrotate_keys,
                     void* stream);

}  // namespace cuda
}  // namespace kvtile
