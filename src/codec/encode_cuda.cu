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
  cudaError_t launched = cudaSuccess;
  const auto launch = [&](auto key, auto value, auto head_dim, auto is_wide) {
    using Shape = EncodeShape<key.value, value.value, head_dim.value, is_wide.value>;
    const uint32_t rows = Shape::kWarps * Shape::kRows;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((params.num_items + rows - 1) / rows);
    config.blockDim = dim3(Shape::kWarps * 32);
    config.stream = static_cast<cudaStream_t>(stream);
    // Blocks may settle before the launch ahead has ended: a store of a few thousand tokens is two
    // or three waves, whose last one leaves room. They wait before they read.
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = params.early_launch ? 1 : 0;
    launched = cudaLaunchKernelEx(
        &config, encode_kernel<key.value, value.value, head_dim.value, is_wide.value>, params);
  };
  const Status known = for_format(format, [&](auto key, auto value, auto head_dim) {
    if (wide) {
      launch(key, value, head_dim, std::true_type());
    } else {
      launch(key, value, head_dim, std::false_type());
    }
  });
  if (!known.ok()) return known;
  return cuda_status("encode launch", launched);
}

}  // namespace kvtile::cuda
