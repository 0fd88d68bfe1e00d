// Opens a call of the tile engine: the sequence table, and the rows nobody owns. Lengths are read
// on the device.
#pragma once

#include "src/attention/cuda/sm80/tile_common.cuh"
#include "src/attention/cuda/sm80/tile_params.h"

namespace kvtile::cuda {

// One thread block. Lengths are clamped so that no index leaves the call's tensors.
__device__ __forceinline__ void describe_sequences(const TileParams& params) {
  __shared__ int partial[kPrepareThreads];
  const AttentionParams& call = params.call;
  SequenceInfo* sequences = params.sequences();
  const int per_thread = (call.num_seqs + kPrepareThreads - 1) / kPrepareThreads;
  const int first = min(static_cast<int>(threadIdx.x) * per_thread, call.num_seqs);
  const int end = min(first + per_thread, call.num_seqs);
  const int rows = params.plan.rows();
  const auto read = [&](int seq) {
    SequenceInfo info;
    const int64_t begin =
        min(max(static_cast<int64_t>(call.cu_seqlens_q[seq]), int64_t{0}), call.total_q);
    const int64_t limit =
        min(max(static_cast<int64_t>(call.cu_seqlens_q[seq + 1]), begin), call.total_q);
    info.q_begin = static_cast<int>(begin);
    info.q_len = static_cast<int>(limit - begin);
    info.seq_len = max(call.seq_lens[seq], 0);
    info.first_row_block = (info.q_len * params.plan.group + rows - 1) / rows;  // its own, so far
    return info;
  };
  int count = 0;
  for (int seq = first; seq < end; ++seq) count += read(seq).first_row_block;
  partial[threadIdx.x] = count;
  __syncthreads();
  for (int step = 1; step < kPrepareThreads; step *= 2) {
    const int before = static_cast<int>(threadIdx.x) >= step ? partial[threadIdx.x - step] : 0;
    __syncthreads();
    partial[threadIdx.x] += before;
    __syncthreads();
  }
  int before = threadIdx.x > 0 ? partial[threadIdx.x - 1] : 0;
  for (int seq = first; seq < end; ++seq) {
    SequenceInfo info = read(seq);
    const int own = info.first_row_block;
    info.first_row_block = before;
    sequences[seq] = info;
    before += own;
  }
  if (threadIdx.x == 0) {
    SequenceInfo last;
    last.first_row_block = partial[kPrepareThreads - 1];
    sequences[call.num_seqs] = last;
  }
}

// Rows no sequence owns are zeros with lse -inf.
__device__ __forceinline__ void clear_padding(const TileParams& params) {
  const AttentionParams& call = params.call;
  const int64_t named = call.num_seqs == 0 ? 0 : call.cu_seqlens_q[call.num_seqs];
  const int64_t first = min(max(named, int64_t{0}), call.total_q);
  const int64_t total = (call.total_q - first) * call.num_heads;
  const int warps = kPrepareThreads / 32;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; at < total;
       at += static_cast<int64_t>(gridDim.x) * warps) {
    const int64_t token = first + at / call.num_heads, head = at % call.num_heads;
    const int64_t out = token * call.out_stride_token + head * call.out_stride_head;
    for (int d = threadIdx.x % 32; d < params.plan.head_dim; d += 32) {
      store_element(call.out, call.dtype, out + d, 0.0f);
    }
    if (call.lse != nullptr && threadIdx.x % 32 == 0) {
      call.lse[head * call.lse_stride_head + token * call.lse_stride_token] =
          __int_as_float(0xff800000);
    }
  }
}

__global__ void __launch_bounds__(kPrepareThreads)
    tile_open_kernel(const __grid_constant__ TileParams params) {
  if (blockIdx.x == 0 && params.call.num_seqs > 0) describe_sequences(params);
  clear_padding(params);
}

}  // namespace kvtile::cuda
