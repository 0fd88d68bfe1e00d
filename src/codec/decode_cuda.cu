// Instances and launch of the decode kernels.
#include <cuda_runtime.h>

#include "src/codec/codec_cuda.h"
#include "src/codec/decode.cuh"
#include "src/codec/formats.cuh"
#include "src/core/device.h"

namespace kvtile::cuda {

Status launch_decode(const SlotFormat& format, const DecodeParams& params, bool unrotate_keys,
                     void* stream_handle) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  const Status known = for_format(format, [&](auto key, auto value, auto head_dim) {
    constexpr int kRows = RowDecoder<key.value, value.value, head_dim.value>::kRows;
    constexpr int kThreads = RowDecoder<key.value, value.value, head_dim.value>::kThreads;
    const uint32_t blocks = (params.num_items + kRows - 1) / kRows;
    DecodeParams rest = params;
    if constexpr (!is_fp8(key.value)) {
      if (unrotate_keys && params.key != nullptr) {
        decode_unrotated_kernel<key.value, value.value, head_dim.value>
            <<<blocks, kThreads, 0, stream>>>(params);
        rest.key = nullptr;
      }
    }
    if (rest.key != nullptr || rest.value != nullptr) {
      decode_kernel<key.value, value.value, head_dim.value><<<blocks, kThreads, 0, stream>>>(rest);
    }
  });
  if (!known.ok()) return known;
  return cuda_status("decode launch", cudaGetLastError());
}

}  // namespace kvtile::cuda
