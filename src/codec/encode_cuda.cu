// Instances and launch of the encode kernel: every preset and FP8 flavour at the head sizes the
// CUDA backend serves, 16- and 32-bit rows.
#include <cuda_runtime.h>

#include "src/codec/codec_cuda.h"
#include "src/codec/encode.cuh"
#include "src/codec/formats.cuh"
#include "src/core/device.h"

namespace kvtile::cuda {

Status launch_encode(const SlotFormat& format, DType dtype, const EncodeParams& params,
                     void* stream) {
  const bool wide = dtype == DType::kFloat32;
  const auto launch = [&](auto key, auto value, auto head_dim, auto is_wide) {
    using Shape = EncodeShape<key.value, value.value, head_dim.value, is_wide.value>;
    const uint32_t rows = Shape::kWarps * Shape::kRows;
    encode_kernel<key.value, value.value, head_dim.value, is_wide.value>
        <<<(params.num_items + rows - 1) / rows, Shape::kWarps * 32, 0,
           static_cast<cudaStream_t>(stream)>>>(params);
  };
  const Status known = for_format(format, [&](auto key, auto value, auto head_dim) {
    if (wide) {
      launch(key, value, head_dim, std::true_type());
    } else {
      launch(key, value, head_dim, std::false_type());
    }
  });
  if (!known.ok()) return known;
  return cuda_status("encode launch", cudaGetLastError());
}

}  // namespace kvtile::cuda
