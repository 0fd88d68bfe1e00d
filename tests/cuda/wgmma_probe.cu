// The operands as the tile image and cuda/hopper lay them out, one warpgroup, one product.
#include "src/attention/cuda/image.h"
#include "src/core/ptx.cuh"
#include "src/core/wgmma.cuh"
#include "tests/cuda/wgmma_probe.h"

namespace kvtile::testing {
namespace {

constexpr int kRows = 64, kAcross = 128, kDepth = 16;

template <bool kValues>
__global__ void probe_kernel(const uint16_t* a, const uint16_t* b, float* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using cuda::chunk_offset;
  constexpr int kTokens = kValues ? 64 : kAcross;  // of B's plane
  __shared__ __align__(128) uint16_t a_plane[kRows * kDepth], b_plane[64 * kAcross];
  for (int i = threadIdx.x; i < kRows * kDepth; i += blockDim.x) {
    const int row = i / kDepth, k = i % kDepth;
    a_plane[chunk_offset(k / 8, row, kRows) / 2 + k % 8] = a[i];
  }
  for (int i = threadIdx.x; i < kAcross * kDepth; i += blockDim.x) {
    const int x = i / kDepth, k = i % kDepth, token = kValues ? k : x, d = kValues ? x : k;
    b_plane[chunk_offset(d / 8, token, kTokens) / 2 + d % 8] = b[i];
  }
  ptx::fence_proxy_async();
  __syncthreads();
  float d[kAcross / 8][4] = {};
  const uint64_t left =
      ptx::matrix_descriptor(ptx::shared_address(a_plane), cuda::key_operand(kRows));
  const uint64_t right =
      ptx::matrix_descriptor(ptx::shared_address(b_plane),
                             kValues ? cuda::value_operand(kTokens) : cuda::key_operand(kTokens));
  ptx::pin(d);
  ptx::wgmma_fence();
  ptx::wgmma_ss<kValues>(d, left, right, false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(d);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < kAcross / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = warp * 16 + e / 2 * 8 + lane / 4, x = 8 * j + lane % 4 * 2 + e % 2;
      out[row * kAcross + x] = d[j][e];
    }
  }
#endif
}

}  // namespace

cudaError_t launch_wgmma_probe(const uint16_t* a, const uint16_t* b, bool values, float* out) {
  const auto kernel = values ? probe_kernel<true> : probe_kernel<false>;
  kernel<<<1, 128>>>(a, b, out);
  return cudaGetLastError();
}

}  // namespace kvtile::testing
