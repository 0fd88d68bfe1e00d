// Before the tile engine's attention: the sequence table, the rows nobody owns, and the
// dequantisation of one step's tile. Each kernel reads lengths and tables on the device and leaves
// at once where there is nothing to do.
#pragma once

#include "src/attention/cuda/image.h"
#include "src/attention/cuda/sm80/tile_common.cuh"
#include "src/attention/cuda/sm80/tile_params.h"
#include "src/codec/unpack.cuh"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// --- sequence table ---------------------------------------------------------------------------

// One thread block. Lengths are clamped so that no index leaves the call's tensors.
__global__ void __launch_bounds__(kPrepareThreads)
    tile_sequences_kernel(const __grid_constant__ TileParams params) {
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
__global__ void __launch_bounds__(kPrepareThreads)
    tile_padding_kernel(const __grid_constant__ TileParams params) {
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

// --- tile image ---------------------------------------------------------------------------------

// Where a token of a key block comes from.
struct TokenSource {
  const std::byte* slot = nullptr;  // packed
  int64_t chunk_token = -1;         // raw: row of chunk_key
  bool visible = false;             // hidden tokens are zeros and are not read
};

template <int kKeyBits, int kValueBits>
struct DequantShared {
  // Rows of 4-byte words with an odd pitch, so that one token per lane meets no bank conflict.
  static constexpr int pitch(int head_dim) {
    return ((head_dim * (kKeyBits + kValueBits) / 8 + 10 + 3) / 4 + 1) | 1;
  }
};

// A thread holds at most 32 looked-up levels.
constexpr int image_threads(int head_dim) { return head_dim == 256 ? 512 : 256; }

// Bits [8 * offset, 8 * offset + 32) of a row of words.
__device__ __forceinline__ uint32_t row_word(const uint32_t* row, int offset) {
  return __funnelshift_r(row[offset / 4], row[offset / 4 + 1], offset % 4 * 8);
}

__device__ __forceinline__ float row_half(const uint32_t* row, int offset) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(row_word(row, offset))));
}

__device__ __forceinline__ void store_chunk(std::byte* plane, int chunk, int token,
                                            const uint32_t (&words)[4]) {
  *reinterpret_cast<uint4*>(plane + chunk_offset(chunk, token, kBlockTokens)) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

// Dequantises one key block (64 tokens) of one context into the image: keys as scaled levels,
// values in full, both rounded to fp16 once. Tokens of a raw chunk are rotated like queries.
// Grid: (key blocks of an image, contexts of the group).
template <int kKeyBits, int kValueBits, int kHeadDim>
__global__ void __launch_bounds__(image_threads(kHeadDim), kHeadDim == 256 ? 2 : 4)
    tile_fill_kernel(const __grid_constant__ TileParams params, int context_group, int step) {
  const AttentionParams& call = params.call;
  const TilePlan& plan = params.plan;
  const int64_t context = static_cast<int64_t>(context_group) * plan.contexts + blockIdx.y;
  if (context >= static_cast<int64_t>(plan.num_seqs) * plan.num_kv_heads) return;
  const ContextView view = params.views()[blockIdx.y];
  const StepRange range = step_range(plan, view, step);
  const int first_token = range.begin + static_cast<int>(blockIdx.x) * kBlockTokens;
  const bool used = first_token < range.end && first_token + kBlockTokens > view.begin;
  if (!used) {
    if (threadIdx.x == 0) params.flags(blockIdx.y)[blockIdx.x] = 0;
    return;
  }

  constexpr int kThreads = image_threads(kHeadDim);
  extern __shared__ uint32_t rows[];  // [64][pitch]
  __shared__ TokenSource sources[kBlockTokens];
  __shared__ float levels[16];
  constexpr int kWarps = kThreads / 32;
  __shared__ float squares[kWarps / 2][kBlockTokens];
  constexpr int head_dim = kHeadDim;
  const int pitch = DequantShared<kKeyBits, kValueBits>::pitch(head_dim);
  const SlotFormat format = params.format;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::byte* key_plane = params.image(blockIdx.y) +
                         static_cast<int64_t>(blockIdx.x) * subtile_bytes(kBlockTokens, head_dim);
  std::byte* value_plane = key_plane + plane_bytes(kBlockTokens, head_dim);

  if (threadIdx.x < 16) levels[threadIdx.x] = params.levels[threadIdx.x];
  bool raw_here = false;
  if (threadIdx.x < kBlockTokens) {
    const SequenceInfo sequence = params.sequences()[view.seq];
    const int token = first_token + static_cast<int>(threadIdx.x);
    TokenSource source;
    source.visible = token >= view.begin && token < view.end;
    if (source.visible) {
      const int64_t chunk_row = token - (static_cast<int64_t>(sequence.seq_len) - sequence.q_len);
      if (call.chunk_key != nullptr && chunk_row >= 0) {
        source.chunk_token = sequence.q_begin + chunk_row;
        raw_here = true;
      } else {
        source.slot = call.cache.slot_in_table(call.table_row(view.seq), call.max_blocks,
                                               token - call.first_position(view.seq), view.head);
      }
    }
    sources[threadIdx.x] = source;
  }
  raw_here = __syncthreads_or(raw_here);

  // Packed bytes to shared memory in aligned words. The first may start inside the slot before (in
  // the pool all the same); the last is read only as far as the slot reaches.
  const int slot_bytes = format.slot_bytes();
#pragma unroll
  for (int i = 0; i < kBlockTokens / kWarps; ++i) {
    const int token = warp + i * kWarps;
    const std::byte* slot = sources[token].slot;
    const int at = static_cast<int>(reinterpret_cast<uintptr_t>(slot) & 3);
    const int end = slot == nullptr ? 0 : at + slot_bytes;
    const uint32_t target = ptx::shared_address(rows + token * pitch);
    for (int w = 4 * lane; w < end; w += 128) {
      ptx::cp_async<4>(target + w, slot - at + w, min(4, end - w));
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

  // A thread owns one token and every kWarps / 2-th chunk of eight dimensions, so that a warp
  // stores 512 contiguous bytes. Looked-up levels wait in registers for the token's scale.
  constexpr int kLanesOfToken = kWarps / 2;
  constexpr int kOwnChunks = kHeadDim / kChunkDims / kLanesOfToken;
  const int t = warp % 2 * 32 + lane, own = warp / 2;
  const TokenSource source = sources[t];
  const uint32_t* row = rows + t * pitch;
  const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(source.slot) & 3);
  bool lossy = false;
  if constexpr (kKeyBits != 8) {
    float levels_of[kOwnChunks][8];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      const uint32_t codes = row_word(row, phase + (own + i * kLanesOfToken) * kKeyBits);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // The code's byte offset in the table, by one shift and one mask.
        const uint32_t shifted = e == 0 ? codes << 2 : codes >> (e * kKeyBits - 2);
        levels_of[i][e] = *reinterpret_cast<const float*>(
            reinterpret_cast<const std::byte*>(levels) + (shifted & (4 * ((1 << kKeyBits) - 1))));
        sum = fmaf(levels_of[i][e], levels_of[i][e], sum);
      }
    }
    squares[own][t] = sum;
    __syncthreads();
    if (source.chunk_token < 0) {
      float scale = 0.0f;
      if (source.slot != nullptr) {
        const float norm = row_half(row, phase + format.norm_offset());
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kLanesOfToken; ++i) total += squares[i][t];
        scale = format.norm_correction ? __fdiv_rn(norm, __fsqrt_rn(total)) : norm;
        // A non-finite norm loses every row that sees the key; infinities could cancel.
        if (!isfinite(norm)) scale = __int_as_float(0x7fffffff);
      } else if (source.visible) {
        scale = __int_as_float(0x7fffffff);  // named by no page: whoever sees it is lost
      }
#pragma unroll
      for (int i = 0; i < kOwnChunks; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          words[e] = ptx::cvt_half2(levels_of[i][2 * e] * scale, levels_of[i][2 * e + 1] * scale);
        }
        if (source.slot == nullptr && !source.visible)
          words[0] = words[1] = words[2] = words[3] = 0;
        store_chunk(key_plane, own + i * kLanesOfToken, t, words);
      }
    }
  } else if (source.chunk_token < 0) {
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      const int chunk = own + i * kLanesOfToken;
      uint32_t words[4] = {};
      if (source.slot != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t pairs[2];
          fp8_to_half2(format.key, row_word(row, phase + chunk * 8 + half * 4), pairs);
          words[2 * half] = pairs[0];
          words[2 * half + 1] = pairs[1];
        }
      } else if (source.visible) {
        words[0] = words[1] = words[2] = words[3] = 0x7fff7fffu;
      }
      store_chunk(key_plane, chunk, t, words);
    }
  }
  if (source.chunk_token < 0) {
    float scale = 0.0f, zero = 0.0f;
    if (source.slot != nullptr) {
      scale = row_half(row, phase + format.scale_offset());
      zero = row_half(row, phase + format.zero_offset());
    }
    // Elements lie between those of the first and the last code.
    const float last = fmaf(static_cast<float>((1 << kValueBits) - 1), scale, zero);
    const bool plain = fabsf(zero) <= 65504.0f && fabsf(last) <= 65504.0f;
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      const int chunk = own + i * kLanesOfToken;
      const uint32_t codes =
          source.slot == nullptr
              ? 0
              : row_word(row, phase + format.value_offset() + chunk * kValueBits);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // 2^23 + code, exactly, without a conversion.
        const uint32_t code = (codes >> (e * kValueBits)) & ((1 << kValueBits) - 1);
        x[e] = fmaf(__uint_as_float(0x4b000000u | code) - 8388608.0f, scale, zero);
      }
      if (!plain) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          lossy |= !isfinite(x[e]);
          // A finite value beyond fp16 saturates: an infinity would not be its nearest element.
          x[e] = isfinite(x[e]) ? fminf(fmaxf(x[e], -65504.0f), 65504.0f) : 0.0f;
        }
      }
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = ptx::cvt_half2(x[2 * e], x[2 * e + 1]);
      store_chunk(value_plane, chunk, t, words);
    }
  }

  if (raw_here) {
    for (int token = warp; token < kBlockTokens; token += kWarps) {
      const int64_t chunk_token = sources[token].chunk_token;
      if (chunk_token < 0) continue;
      const int64_t key_at =
          chunk_token * call.chunk_key_stride_token + view.head * call.chunk_key_stride_head;
      const int64_t value_at =
          chunk_token * call.chunk_value_stride_token + view.head * call.chunk_value_stride_head;
      constexpr int kPer = kHeadDim / 32;
      float x[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        x[e] = load_element(call.chunk_key, call.dtype, key_at + kPer * lane + e);
      }
      if (format.rotated()) rotate_row<kPer>(x);
#pragma unroll
      for (int e = 0; e < kPer; e += 2) {
        // Finite elements beyond fp16 saturate, as the store's norms and values do.
        float a = x[e], b = x[e + 1];
        if (isfinite(a)) a = fminf(fmaxf(a, -65504.0f), 65504.0f);
        if (isfinite(b)) b = fminf(fmaxf(b, -65504.0f), 65504.0f);
        const int d = kPer * lane + e;
        *reinterpret_cast<uint32_t*>(key_plane + chunk_offset(d / 8, token, kBlockTokens) +
                                     d % 8 * 2) = ptx::cvt_half2(a, b);
      }
#pragma unroll
      for (int e = 0; e < kPer; e += 2) {
        const int d = kPer * lane + e;
        float a = load_element(call.chunk_value, call.dtype, value_at + d);
        float b = load_element(call.chunk_value, call.dtype, value_at + d + 1);
        lossy |= !isfinite(a) || !isfinite(b);
        a = isfinite(a) ? fminf(fmaxf(a, -65504.0f), 65504.0f) : 0.0f;
        b = isfinite(b) ? fminf(fmaxf(b, -65504.0f), 65504.0f) : 0.0f;
        *reinterpret_cast<uint32_t*>(value_plane + chunk_offset(d / 8, token, kBlockTokens) +
                                     d % 8 * 2) = ptx::cvt_half2(a, b);
      }
    }
  }

  const int any_lossy = __syncthreads_or(lossy);
  if (threadIdx.x == 0) params.flags(blockIdx.y)[blockIdx.x] = any_lossy != 0;
  if (!any_lossy) return;
  uint64_t* lost_tokens =
      params.lost_tokens(blockIdx.y) + static_cast<int64_t>(blockIdx.x) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += kThreads) {
    uint64_t tokens = 0;
    for (int token = 0; token < kBlockTokens; ++token) {
      const TokenSource from = sources[token];
      bool lost = false;
      if (from.chunk_token >= 0) {
        lost = !isfinite(load_element(call.chunk_value, call.dtype,
                                      from.chunk_token * call.chunk_value_stride_token +
                                          view.head * call.chunk_value_stride_head + d));
      } else if (from.slot != nullptr) {
        const int at = static_cast<int>(reinterpret_cast<uintptr_t>(from.slot) & 3);
        const uint32_t* bytes = rows + token * pitch;
        const uint32_t codes = row_word(bytes, at + format.value_offset() + d / 8 * kValueBits);
        const auto code =
            static_cast<float>((codes >> (d % 8 * kValueBits)) & ((1 << kValueBits) - 1));
        lost = !isfinite(fmaf(code, row_half(bytes, at + format.scale_offset()),
                              row_half(bytes, at + format.zero_offset())));
      }
      tokens |= static_cast<uint64_t>(lost) << token;
    }
    lost_tokens[d] = tokens;
  }
}

}  // namespace kvtile::cuda
