// SIMD targets of the CPU code. Kernels are compiled once per target by Highway's header-only
// foreach_target; this picks among them at run time (ADR 0001 says why not Highway's own dispatch).
#pragma once

#include <string_view>

// Fewer targets, faster builds: AVX-512 and AVX2 on x86 (plus the compiler's baseline, one-lane
// code), the baseline alone (NEON) elsewhere: SVE vectors cannot be elements of an array of
// accumulators.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

namespace kvtile {

enum class SimdTarget { kBaseline = 0, kAvx2 = 1, kAvx3 = 2 };

// The best target this machine runs.
SimdTarget best_simd_target();
bool simd_target_available(SimdTarget target);
// "avx3", "avx2", or the baseline's name ("scalar", "neon").
const char* simd_target_name(SimdTarget target);

// Resolves a backend name "cpu" or "cpu/<target>". False if it names no target of this build and
// machine.
bool parse_cpu_backend(std::string_view name, SimdTarget* target);
// "cpu/<target>"
const char* cpu_backend_name(SimdTarget target);

// 0 means every thread OpenMP would use.
int resolve_num_threads(int requested);

}  // namespace kvtile
