// Host side of merge_states() on the device: checks, then one launch.
#include <cstdint>

#include "src/attention/cuda/backends_cuda.h"
#include "src/attention/cuda/merge_kernel.h"
#include "src/core/device.h"
#include "src/core/status.h"

namespace kvtile {

Status merge_states_cuda(const MergeCall& call, const RunOptions& options) {
  const DeviceInfo* device;
  KVTILE_RETURN_IF_ERROR(backend_device("cuda", options.device, &device));
  KVTILE_RETURN_IF_ERROR(check_stream(options.stream, *device));
  if (call.num_states > cuda::kMergeMaxStates) {
    return unsupported("num_states", call.num_states,
                       fmt::format("at most {} on backend cuda", cuda::kMergeMaxStates));
  }
  if (call.total_q == 0) return {};
  const int64_t row = int64_t{call.num_heads} * call.head_dim;
  const auto or_dense = [](int64_t stride, int64_t dense) { return stride != 0 ? stride : dense; };
  KVTILE_RETURN_IF_ERROR(check_device_pointer("out", call.out, *device));
  if (call.lse != nullptr) KVTILE_RETURN_IF_ERROR(check_device_pointer("lse", call.lse, *device));
  cuda::MergeParams params;
  for (int i = 0; i < call.num_states; ++i) {
    const PartialState& state = call.states[i];
    KVTILE_RETURN_IF_ERROR(
        check_device_pointer(fmt::format("states[{}].out", i).c_str(), state.out, *device));
    KVTILE_RETURN_IF_ERROR(
        check_device_pointer(fmt::format("states[{}].lse", i).c_str(), state.lse, *device));
    params.states[i] = {state.out,
                        state.lse,
                        or_dense(state.out_stride_token, row),
                        or_dense(state.out_stride_head, call.head_dim),
                        or_dense(state.lse_stride_head, call.total_q),
                        or_dense(state.lse_stride_token, 1)};
  }
  params.out = call.out;
  params.lse = call.lse;
  params.out_stride_token = or_dense(call.out_stride_token, row);
  params.out_stride_head = or_dense(call.out_stride_head, call.head_dim);
  params.lse_stride_head = or_dense(call.lse_stride_head, call.total_q);
  params.lse_stride_token = or_dense(call.lse_stride_token, 1);
  params.num_rows = call.total_q * call.num_heads;
  params.num_states = call.num_states;
  params.num_heads = call.num_heads;
  params.head_dim = call.head_dim;
  params.dtype = call.dtype;
  const CurrentDevice current(*device);
  return cuda_status("merge",
                     cuda::launch_merge(params, static_cast<cudaStream_t>(options.stream)));
}

}  // namespace kvtile
