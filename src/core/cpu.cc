// Run-time choice of the SIMD target and of the thread count.
#include "src/core/cpu.h"

#include <omp.h>

#include <algorithm>

namespace kvtile {
namespace {

#if defined(__aarch64__)
constexpr const char* kBaselineName = "neon";
constexpr const char* kBaselineBackend = "cpu/neon";
#else
constexpr const char* kBaselineName = "scalar";
constexpr const char* kBaselineBackend = "cpu/scalar";
#endif

}  // namespace

bool simd_target_available(SimdTarget target) {
#if defined(__x86_64__)
  // What Highway's AVX2 and AVX3 targets are compiled for. F16C is not asked for: clang 14 cannot,
  // and every processor with AVX2 has it.
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  static const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") &&
                           __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd");
  if (target == SimdTarget::kAvx2) return avx2;
  if (target == SimdTarget::kAvx3) return avx3;
#endif
  return target == SimdTarget::kBaseline;
}

SimdTarget best_simd_target() {
  if (simd_target_available(SimdTarget::kAvx3)) return SimdTarget::kAvx3;
  if (simd_target_available(SimdTarget::kAvx2)) return SimdTarget::kAvx2;
  return SimdTarget::kBaseline;
}

const char* simd_target_name(SimdTarget target) {
  return target == SimdTarget::kAvx3   ? "avx3"
         : target == SimdTarget::kAvx2 ? "avx2"
                                       : kBaselineName;
}

const char* cpu_backend_name(SimdTarget target) {
  return target == SimdTarget::kAvx3   ? "cpu/avx3"
         : target == SimdTarget::kAvx2 ? "cpu/avx2"
                                       : kBaselineBackend;
}

bool parse_cpu_backend(std::string_view name, SimdTarget* target) {
  if (name == "cpu") {
    *target = best_simd_target();
    return true;
  }
  for (SimdTarget t : {SimdTarget::kBaseline, SimdTarget::kAvx2, SimdTarget::kAvx3}) {
    if (name == cpu_backend_name(t) && simd_target_available(t)) {
      *target = t;
      return true;
    }
  }
  return false;
}

int resolve_num_threads(int requested) {
  return requested > 0 ? requested : std::max(1, omp_get_max_threads());
}

}  // namespace kvtile
