// Products of a warpgroup (wgmma, sm_90a only): fp16 operands without swizzle, fp32 accumulators.
// The other half of ptx.cuh: each function is one PTX instruction. Matrices in shared memory are
// named by descriptors (matrix_descriptor.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvtile::ptx {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Orders register accesses before the warpgroup's next products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// x, by a path the compiler cannot see through.
__device__ __forceinline__ uint32_t hidden(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Waits until at most kPending of the newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Keeps the compiler's accesses of a product's registers on their side of this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount][4]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}

__device__ __forceinline__ void pin(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) pin(a[j]);
}

#define KVTILE_ACCUMULATOR_1(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define KVTILE_ACCUMULATOR_2(d, j) KVTILE_ACCUMULATOR_1(d, j), KVTILE_ACCUMULATOR_1(d, j + 1)
#define KVTILE_ACCUMULATOR_4(d, j) KVTILE_ACCUMULATOR_2(d, j), KVTILE_ACCUMULATOR_2(d, j + 2)

// D = A B or D += A B, m64 k16; both operands in shared memory, or A in registers.
template <int kTransposed>
__device__ __forceinline__ void wgmma_ss(float (&d)[8][4], uint64_t a, uint64_t b,
                                         bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.s32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, accumulate, 1, 1, 0, %35;\n"
      "}\n"
      : KVTILE_ACCUMULATOR_4(d, 0), KVTILE_ACCUMULATOR_4(d, 4)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void wgmma_ss(float (&d)[16][4], uint64_t a, uint64_t b,
                                         bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.s32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, accumulate, 1, 1, 0, %67;\n"
      "}\n"
      : KVTILE_ACCUMULATOR_4(d, 0), KVTILE_ACCUMULATOR_4(d, 4), KVTILE_ACCUMULATOR_4(d, 8),
        KVTILE_ACCUMULATOR_4(d, 12)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void wgmma_rs(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.s32 accumulate, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, accumulate, 1, 1, %14;\n"
      "}\n"
      : KVTILE_ACCUMULATOR_2(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void wgmma_rs(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.s32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, accumulate, 1, 1, %22;\n"
      "}\n"
      : KVTILE_ACCUMULATOR_4(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void wgmma_rs(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.s32 accumulate, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, accumulate, 1, 1, %38;\n"
      "}\n"
      : KVTILE_ACCUMULATOR_4(d, 0), KVTILE_ACCUMULATOR_4(d, 4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void wgmma_rs(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.s32 accumulate, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, accumulate, 1, 1, %70;\n"
      "}\n"
      : KVTILE_ACCUMULATOR_4(d, 0), KVTILE_ACCUMULATOR_4(d, 4), KVTILE_ACCUMULATOR_4(d, 8),
        KVTILE_ACCUMULATOR_4(d, 12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void wgmma_rs(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.s32 accumulate, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "{%128, %129, %130, %131}, %132, accumulate, 1, 1, %134;\n"
      "}\n"
      : KVTILE_ACCUMULATOR_4(d, 0), KVTILE_ACCUMULATOR_4(d, 4), KVTILE_ACCUMULATOR_4(d, 8),
        KVTILE_ACCUMULATOR_4(d, 12), KVTILE_ACCUMULATOR_4(d, 16), KVTILE_ACCUMULATOR_4(d, 20),
        KVTILE_ACCUMULATOR_4(d, 24), KVTILE_ACCUMULATOR_4(d, 28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransposed));
}

#undef KVTILE_ACCUMULATOR_1
#undef KVTILE_ACCUMULATOR_2
#undef KVTILE_ACCUMULATOR_4

#endif  // sm_90a

}  // namespace kvtile::ptx
