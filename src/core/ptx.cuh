// Every line of inline assembly in the project. Device code only; each function is one PTX
// instruction (or one wait loop) with the operands spelt out, so that the kernels read as plain
// C++. Instructions newer than sm_80 are guarded by the architecture they need.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace kvtile::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read where it is asked for: no register holds it between.
__device__ __forceinline__ int thread_index() {
  int d;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(d));
  return d;
}

// Volatile, so that they stay on their side of a barrier.
__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float d;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(d) : "r"(address));
  return d;
}

// Free to move: for tables that are complete before the address can be known.
__device__ __forceinline__ uint2 load_shared_table(uint32_t address) {
  uint2 d;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(address));
  return d;
}

// --- bytes and bits -------------------------------------------------------------------------

// Byte permute with the full selector: nibble bits 0..2 pick a byte of {b, a}, bit 3 replicates
// that byte's sign.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// Any boolean function of three words; kTable is f(0xf0, 0xcc, 0xaa).
template <int kTable>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return d;
}

// Two e4m3 bytes (low byte first) to two fp16, exact; NaN stays NaN.
#if __CUDA_ARCH__ >= 890 || !defined(__CUDA_ARCH__)
__device__ __forceinline__ uint32_t cvt_e4m3x2_to_half2(uint16_t pair) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
  return d;
}
#endif

// a * b + c in one instruction: the compiler would make a shift, a mask and an add of it.
__device__ __forceinline__ uint32_t mad(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// --- arithmetic -----------------------------------------------------------------------------

// 2^x to about 2 ulp; flushes subnormals, 2^-inf = 0.
__device__ __forceinline__ float ex2(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float lg2(float x) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float tanh_approx(float x) {
  float d;
  asm("tanh.approx.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float rcp(float x) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float rsqrt(float x) {
  float d;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// Minimum and maximum that return NaN if either operand is one.
__device__ __forceinline__ float min_nan(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ uint32_t min_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t max_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t min_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// {low, high} to a packed fp16 pair, round to nearest even.
__device__ __forceinline__ uint32_t cvt_half2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// --- tensor cores ---------------------------------------------------------------------------

// D += A B, m16n8k16, fp16 operands, fp32 accumulators.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D += A B, m16n8k8.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&d)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&d)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements held as MMA fragments: lane (g, c) gives row g,
// columns 2c and 2c + 1.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t fragment) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(fragment));
  return d;
}

// --- shared memory by 32-bit address --------------------------------------------------------

__device__ __forceinline__ uint32_t ld_shared(uint32_t address) {
  uint32_t d;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(address));
  return d;
}

__device__ __forceinline__ void ld_shared2(uint32_t address, uint32_t* x, uint32_t* y) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(*x), "=r"(*y) : "r"(address));
}

__device__ __forceinline__ void ld_shared4(uint32_t address, uint32_t* x, uint32_t* y, uint32_t* z,
                                           uint32_t* w) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(*x), "=r"(*y), "=r"(*z), "=r"(*w)
               : "r"(address));
}

__device__ __forceinline__ uint64_t ld_shared_u64(uint32_t address) {
  uint64_t d;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(d) : "r"(address));
  return d;
}

__device__ __forceinline__ void st_shared_u64(uint32_t address, uint64_t x) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}

// Atomic maximum.
__device__ __forceinline__ void max_shared(uint32_t address, uint32_t x) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Zero-extended.
__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t address) {
  uint32_t d;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(d) : "r"(address));
  return d;
}

__device__ __forceinline__ float ld_shared_float(uint32_t address) {
  return __uint_as_float(ld_shared(address));
}

// An fp16 word.
__device__ __forceinline__ float ld_shared_half(uint32_t address) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(ld_shared_u16(address))));
}

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared2(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void st_shared4(uint32_t address, uint32_t x, uint32_t y, uint32_t z,
                                           uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

__device__ __forceinline__ void st_shared_u16(uint32_t address, uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

__device__ __forceinline__ void st_shared_float(uint32_t address, float x) {
  st_shared(address, __float_as_uint(x));
}

// --- asynchronous copies (sm_80) ------------------------------------------------------------

// Copies source_bytes (at most kBytes) and fills the rest of kBytes with zeros; nothing is read
// when source_bytes is 0. kBytes is 4, 8 or 16, and both addresses are multiples of it.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32_t shared, const void* global,
                                         int source_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
                 "n"(kBytes), "r"(source_bytes)
                 : "memory");
  }
}

// All kBytes, always: without the source size there is less to compute.
template <int kBytes>
__device__ __forceinline__ void cp_async_whole(uint32_t shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes)
               : "memory");
}

// All 16 bytes, always: without the source size the compiler spends one instruction.
__device__ __forceinline__ void cp_async16(uint32_t shared, uint64_t global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- global memory hints --------------------------------------------------------------------

__device__ __forceinline__ uint4 load_streaming(const uint4* global) {
  uint4 d;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "l"(global));
  return d;
}

// Publication of partial results between thread blocks of one launch.
__device__ __forceinline__ int atomic_add_acquire_release(int* global, int value) {
  int d;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(d)
               : "l"(global), "r"(value)
               : "memory");
  return d;
}

// --- barriers -------------------------------------------------------------------------------

// Named barrier 1..15 among `threads` threads (a multiple of 32).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and the disjunction of every thread's predicate.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "barrier.red.or.pred any, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Counts 0, 1, ..., last, 0, ...: returns the counter before.
__device__ __forceinline__ uint32_t shared_increment(uint32_t counter, uint32_t last) {
  uint32_t d;
  asm volatile("atom.relaxed.cta.shared.inc.u32 %0, [%1], %2;"
               : "=r"(d)
               : "r"(counter), "r"(last)
               : "memory");
  return d;
}

// Arrives on the barrier when this thread's earlier cp.async copies are done; the arrival counts
// among those the barrier was initialised with.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

// Waits for the completion of the barrier's phase of this parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

#endif  // below sm_90

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the completion of the barrier's phase of this parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Bulk copy by the copy engine; addresses and bytes are multiples of 16. Completes on the barrier.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same by one lane of a warp whose lanes all name the same copy.
__device__ __forceinline__ void bulk_copy_of_warp(uint32_t shared, uint64_t global, int bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later ones of the copy engine and
// the tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Adds to global memory, each element rounded once; nothing comes back.
__device__ __forceinline__ void add_global(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

__device__ __forceinline__ void add_global4(float4* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// Programmatic dependent launch: wait for the results of the launches before this one; let the
// launches after this one start.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#endif  // sm_90

}  // namespace kvtile::ptx
