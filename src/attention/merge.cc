// merge_states(): partial results over disjoint keys, combined by log-sum-exp in float64.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "kvtile/attention.h"
#if defined(KVTILE_CUDA)
#include "src/attention/cuda/backends_cuda.h"
#endif
#include "src/core/cpu.h"
#include "src/core/device.h"
#include "src/core/dtype.h"
#include "src/core/float16.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Strides {
  int64_t out_token, out_head, lse_head, lse_token;
};

Strides fill(int64_t out_token, int64_t out_head, int64_t lse_head, int64_t lse_token,
             const MergeCall& call) {
  return {out_token != 0 ? out_token : int64_t{call.num_heads} * call.head_dim,
          out_head != 0 ? out_head : call.head_dim, lse_head != 0 ? lse_head : call.total_q,
          lse_token != 0 ? lse_token : 1};
}

Strides strides_of(const PartialState& state, const MergeCall& call) {
  return fill(state.out_stride_token, state.out_stride_head, state.lse_stride_head,
              state.lse_stride_token, call);
}

void merge_row(const MergeCall& call, int64_t token, int64_t head) {
  const Strides to = fill(call.out_stride_token, call.out_stride_head, call.lse_stride_head,
                          call.lse_stride_token, call);
  double top = -kInfinity;
  bool is_nan = false;
  int num_live = 0, live = 0;  // states that are not empty; one of them
  const auto lse_of = [&](int i) {
    const Strides s = strides_of(call.states[i], call);
    return static_cast<double>(call.states[i].lse[head * s.lse_head + token * s.lse_token]);
  };
  for (int i = 0; i < call.num_states; ++i) {
    const double lse = lse_of(i);
    is_nan |= std::isnan(lse) || lse == kInfinity;
    top = std::max(top, lse);
    if (lse == -kInfinity) continue;
    ++num_live;
    live = i;
  }
  double total = 0.0;
  for (int i = 0; i < call.num_states; ++i) {
    if (lse_of(i) != -kInfinity) total += std::exp(lse_of(i) - top);
  }
  // A lone state is copied: sums would lose the sign of its zeros.
  double merged = num_live > 1 ? top + std::log(total) : top;
  if (is_nan) merged = std::numeric_limits<double>::quiet_NaN();
  const auto element = [&](int i, int d) {
    const Strides s = strides_of(call.states[i], call);
    return call.states[i].out[token * s.out_token + head * s.out_head + d];
  };
  for (int d = 0; d < call.head_dim; ++d) {
    double sum = 0.0;
    for (int i = 0; i < call.num_states; ++i) {
      const double lse = lse_of(i);
      if (lse == -kInfinity) continue;  // an empty state's payload is never read
      sum += std::exp(lse - top) * element(i, d);
    }
    const float value = is_nan          ? static_cast<float>(merged)
                        : num_live == 0 ? 0.0f
                        : num_live == 1 ? element(live, d)
                                        : static_cast<float>(sum / total);
    store_element(call.out, token * to.out_token + head * to.out_head + d, call.dtype, value);
  }
  if (call.lse != nullptr) {
    call.lse[head * to.lse_head + token * to.lse_token] = static_cast<float>(merged);
  }
}

}  // namespace

Status merge_states(const MergeCall& call, const RunOptions& options) {
  const std::string_view backend = options.backend == nullptr ? "cpu" : options.backend;
  SimdTarget target;
  if (backend != "cuda" && !parse_cpu_backend(backend, &target)) {
    return Status(StatusCode::kUnavailable,
                  fmt::format("backend: got {}, wanted cpu or cuda", backend));
  }
  KVTILE_RETURN_IF_ERROR(check_dtype(call.dtype));
  if (call.num_states < 1) return invalid("num_states", call.num_states, ">= 1");
  if (call.states == nullptr) return invalid("states", "null", "[num_states] partial states");
  if (call.total_q < 0) return invalid("total_q", call.total_q, ">= 0");
  if (call.num_heads < 1) return invalid("num_heads", call.num_heads, ">= 1");
  if (call.head_dim < 1) return invalid("head_dim", call.head_dim, ">= 1");
  if (call.total_q == 0) return {};
  if (call.out == nullptr) return invalid("out", "null", "[total_q, num_heads, head_dim]");
  for (int i = 0; i < call.num_states; ++i) {
    if (call.states[i].out == nullptr || call.states[i].lse == nullptr) {
      return invalid(fmt::format("states[{}].{}", i, call.states[i].out == nullptr ? "out" : "lse"),
                     "null", "an array");
    }
  }
  if (backend == "cuda") {
#if defined(KVTILE_CUDA)
    return merge_states_cuda(call, options);
#else
    const DeviceInfo* device;
    return backend_device(backend, options.device, &device);
#endif
  }
  const int64_t rows = call.total_q * call.num_heads;
#pragma omp parallel for schedule(static) num_threads(resolve_num_threads(options.num_threads))
  for (int64_t row = 0; row < rows; ++row) {
    merge_row(call, row / call.num_heads, row % call.num_heads);
  }
  return {};
}

}  // namespace kvtile
