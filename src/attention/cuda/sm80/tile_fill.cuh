// Dequantises one step's tile into the fp16 image, 64 tokens of a KV head at a time. Thread blocks
// share the key blocks whatever their number: all SMs fill the first tile, a few fill the next one
// while the others attend. The packed rows of the next key block arrive, and the table entries of
// the one after it are looked up, while a block is dequantised.
#pragma once

#include "src/attention/cuda/image.h"
#include "src/attention/cuda/sm80/tile_common.cuh"
#include "src/attention/cuda/sm80/tile_params.h"
#include "src/codec/unpack.cuh"
#include "src/core/ptx.cuh"

namespace kvtile::cuda {

// A context of the launch group, as the fill reads it.
struct FillContext {
  int seq = 0, head = 0;
  int q_begin = 0, cached_len = 0;
  int first_position = 0;                // of the block table
  int begin = 0, end = 0;                // keys that any row of the group sees
  int first = 0;                         // key of the step
  int filled_begin = 0, filled_end = 0;  // keys of the step in whole sub-tiles of the image
};

// Where a token of a key block comes from. Hidden tokens are zeros and are not read.
struct TokenSource {
  const std::byte* slot = nullptr;  // packed; null: raw, hidden, or named by no page
  int chunk_token = -1;             // raw: row of chunk_key
  bool visible = false;
};

// A thread holds at most 32 looked-up levels.
constexpr int fill_threads(int head_dim) { return head_dim == 256 ? 512 : 256; }
constexpr int fill_blocks_of_sm(int head_dim) { return head_dim == 256 ? 2 : 4; }

// Offsets of a slot with codes of these sizes; FP8 flavours and norm correction do not move them.
constexpr SlotFormat fill_format(int key_bits, int value_bits, int head_dim) {
  return {head_dim,
          key_bits == 8   ? KeyCode::kFp8E4M3
          : key_bits == 4 ? KeyCode::kLloydMax4
                          : KeyCode::kLloydMax3,
          value_bits == 4 ? ValueCode::kUniform4 : ValueCode::kUniform3, false};
}

// Words of a row in shared memory: a slot at either 2-byte phase and the word after it. Odd, so
// that one token per lane meets no bank conflict.
constexpr int fill_pitch(int slot_bytes) { return ((slot_bytes + 2 + 3) / 4 + 1) | 1; }

// Two neighbouring levels and the sum of their squares; a copy for each lane of a half warp, so
// that no mix of codes meets a bank conflict.
struct LevelPair {
  uint32_t halves;
  float squares;
};
inline constexpr int kPairCopies = 16;

constexpr int fill_pairs(int key_bits) { return key_bits == 8 ? 0 : 1 << (2 * key_bits); }

// Pairs of levels, two blocks of rows, the contexts.
constexpr size_t fill_dynamic_bytes(int key_bits, int slot_bytes, int contexts) {
  return static_cast<size_t>(fill_pairs(key_bits)) * kPairCopies * sizeof(LevelPair) +
         static_cast<size_t>(2 * kFillTokens * 4 * fill_pitch(slot_bytes)) +
         static_cast<size_t>(contexts) * sizeof(FillContext);
}

// Bits [8 * offset, 8 * offset + 32) of a row of words.
__device__ __forceinline__ uint32_t row_word(const uint32_t* row, uint32_t offset) {
  return __funnelshift_r(row[offset / 4], row[offset / 4 + 1], offset % 4 * 8);
}

// The codes of a chunk in the field at byte `field`.
template <int kBits>
__device__ __forceinline__ uint32_t chunk_codes(const uint32_t* row, uint32_t field, int chunk) {
  if constexpr (kBits == 4) {
    // One address and one shift for every chunk.
    const uint32_t* words = row + field / 4 + chunk;
    return __funnelshift_r(words[0], words[1], field % 4 * 8);
  }
  return row_word(row, field + static_cast<uint32_t>(chunk * kBits));
}

__device__ __forceinline__ float row_half(const uint32_t* row, uint32_t offset) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(row_word(row, offset))));
}

// A fill block lies in a sub-tile of the image, which may hold several: `target` is its first token
// there, and the chunks of values follow those of keys.
__device__ __forceinline__ void store_chunk(std::byte* target, const uint32_t (&words)[4]) {
  *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ FillContext fill_context(const TileParams& params, const TileStep& at,
                                                    const GroupRows& group, int index) {
  const ContextView view = context_view(params.plan, params.sequences(), params.mask, group,
                                        group.first_context + index);
  const SequenceInfo sequence = params.sequences()[view.seq];
  const StepRange range = step_range(params.plan, view, at.step);
  FillContext context;
  context.seq = view.seq;
  context.head = view.head;
  context.q_begin = sequence.q_begin;
  context.cached_len = sequence.seq_len - sequence.q_len;
  context.first_position = static_cast<int>(params.call.first_position(view.seq));
  context.begin = view.begin;
  context.end = view.end;
  context.first = range.begin;
  // An attention kernel reads whole sub-tiles.
  const int subtile = params.plan.shape.block_tokens;
  context.filled_begin = view.begin / subtile * subtile;
  context.filled_end = (range.end + subtile - 1) / subtile * subtile;
  return context;
}

// Entry of a token's context in the block table, negative where the row ends before it.
__device__ __forceinline__ int64_t token_index(const AttentionParams& call,
                                               const FillContext& context, int token) {
  return call.cache.table_index(call.max_blocks,
                                static_cast<int64_t>(token) - context.first_position);
}

__device__ __forceinline__ TokenSource token_source(const AttentionParams& call,
                                                    const FillContext& context, int token,
                                                    int page) {
  TokenSource source;
  source.visible = token >= context.begin && token < context.end;
  if (!source.visible) return source;
  if (call.chunk_key != nullptr && token >= context.cached_len) {
    source.chunk_token = context.q_begin + token - context.cached_len;
  } else if (const int64_t index = token_index(call, context, token); index >= 0) {
    source.slot = call.cache.slot_on_page(
        page, index, static_cast<int64_t>(token) - context.first_position, context.head);
  }
  return source;
}

// Codes 2e and 2e + 1 of a chunk.
template <int kBits>
__device__ __forceinline__ uint32_t code_pair(uint32_t codes, int e) {
  if constexpr (kBits == 4) return ptx::prmt(codes, 0, 0x4440 | e);
  return (codes >> (2 * kBits * e)) & ((1 << 2 * kBits) - 1);
}

// Packed bytes to shared memory in aligned words. The first may start inside the slot before (in
// the pool all the same); the last is read only as far as the slot reaches.
template <int kWarps, int kSlotBytes>
__device__ __forceinline__ void copy_rows(const TokenSource (&sources)[kFillTokens],
                                          uint32_t rows) {
  constexpr int kWords = (kSlotBytes + 2 + 3) / 4, kWhole = kWords / 32, kRest = kWords % 32;
  constexpr int kOwnTokens = kFillTokens / kWarps;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kOwnTokens;
  const uint32_t target = rows + 4 * (first * fill_pitch(kSlotBytes));
  const auto copy_last = [&](int token, int word) {
    const std::byte* slot = sources[first + token].slot;
    const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(slot) & 2);
    const int left = phase + kSlotBytes - 4 * word;
    if (slot != nullptr && left > 0) {
      ptx::cp_async<4>(target + 4 * (token * fill_pitch(kSlotBytes) + word),
                       slot - phase + 4 * word, min(4, left));
    }
  };
#pragma unroll
  for (int token = 0; token < kOwnTokens; ++token) {
    if constexpr (kWhole > 0) {
      const std::byte* slot = sources[first + token].slot;
      if (slot != nullptr) {
        const std::byte* word = slot - (reinterpret_cast<uintptr_t>(slot) & 2) + 4 * lane;
#pragma unroll
        for (int w = 0; w < kWhole; ++w) {
          ptx::cp_async_whole<4>(target + 4 * (token * fill_pitch(kSlotBytes) + 32 * w + lane),
                                 word + 128 * w);
        }
      }
    }
    if constexpr (kRest > 4) {
      if (lane < kRest) copy_last(token, 32 * kWhole + lane);
    }
  }
  // The few words that are left of all tokens at once.
  if constexpr (kRest > 0 && kRest <= 4) {
    for (int i = lane; i < kOwnTokens * kRest; i += 32) {
      copy_last(i / kRest, 32 * kWhole + i % kRest);
    }
  }
}

// Keys as scaled levels, values in full, each element rounded to fp16 once (levels are scaled so
// that fp16 holds them to 7.4e-5). A thread owns one token and every kWarps / 2-th chunk of eight
// dimensions, so that a warp stores 512 contiguous bytes. True if a value element is not finite.
template <int kKeyBits, int kValueBits, int kHeadDim, int kWarps>
__device__ __forceinline__ bool dequantise(const TileParams& params, const LevelPair* pairs,
                                           float (&squares)[kWarps / 2][kFillTokens],
                                           const TokenSource& source, const uint32_t* row,
                                           std::byte* target) {
  constexpr int kLanesOfToken = kWarps / 2;
  constexpr int kChunks = kHeadDim / kChunkDims;
  constexpr int kOwnChunks = kChunks / kLanesOfToken;
  constexpr SlotFormat kSlot = fill_format(kKeyBits, kValueBits, kHeadDim);
  const SlotFormat& format = params.format;
  const int subtile_tokens = params.plan.shape.block_tokens;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int t = warp % 2 * 32 + lane, own = warp / 2;
  const auto phase = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(source.slot) & 2);
  if constexpr (kKeyBits != 8) {
    // Looked-up levels wait in registers for the token's scale.
    uint32_t levels[kOwnChunks][4];
    float sum = 0.0f;
    const uint32_t own_pairs = ptx::shared_address(pairs + lane % kPairCopies);
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      const uint32_t codes = chunk_codes<kKeyBits>(row, phase, own + i * kLanesOfToken);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint2 found = ptx::load_shared_table(
            ptx::mad(code_pair<kKeyBits>(codes, e), kPairCopies * sizeof(LevelPair), own_pairs));
        levels[i][e] = found.x;
        sum += __uint_as_float(found.y);
      }
    }
    squares[own][t] = sum;
    __syncthreads();
    if (source.chunk_token < 0) {
      float scale = 0.0f;
      if (source.slot != nullptr) {
        const float norm = row_half(row, phase + kSlot.norm_offset());
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kLanesOfToken; ++i) total += squares[i][t];
        scale = norm * (format.norm_correction ? ptx::rsqrt(total) : params.level_scale);
        // A non-finite norm loses every row that sees the key; infinities could cancel.
        if (!isfinite(norm)) scale = __int_as_float(0x7fffffff);
      } else if (source.visible) {
        scale = __int_as_float(0x7fffffff);  // named by no page: whoever sees it is lost
      }
      std::byte* keys = target + chunk_offset(own, t, subtile_tokens);
      // The scale in two halves: their products' sum is rounded once.
      const uint32_t high = ptx::cvt_half2(scale, scale);
      const float rest = scale - __half2float(__ushort_as_half(static_cast<uint16_t>(high)));
      const uint32_t low = ptx::cvt_half2(rest, rest);
#pragma unroll
      for (int i = 0; i < kOwnChunks; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          words[e] = half2_fma(levels[i][e], high, half2_mul(levels[i][e], low));
        }
        store_chunk(keys + chunk_offset(i * kLanesOfToken, 0, subtile_tokens), words);
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
          uint32_t two[2];
          fp8_to_half2(format.key, row_word(row, phase + chunk * 8 + half * 4), two);
          words[2 * half] = two[0];
          words[2 * half + 1] = two[1];
        }
      } else if (source.visible) {
        words[0] = words[1] = words[2] = words[3] = 0x7fff7fffu;
      }
      store_chunk(target + chunk_offset(chunk, t, subtile_tokens), words);
    }
  }
  if (source.chunk_token >= 0) return false;
  uint32_t scale2 = 0, zero2 = 0;
  if (source.slot != nullptr) {
    scale2 = half2_broadcast(static_cast<uint16_t>(row_word(row, phase + kSlot.scale_offset())));
    zero2 = half2_broadcast(static_cast<uint16_t>(row_word(row, phase + kSlot.zero_offset())));
  }
  const float scale = half_bits_to_float(static_cast<uint16_t>(scale2));
  const float zero = half_bits_to_float(static_cast<uint16_t>(zero2));
  // Elements lie between those of the first and the last code.
  const float last = fmaf(static_cast<float>((1 << kValueBits) - 1), scale, zero);
  const bool plain = fabsf(zero) <= 65504.0f && fabsf(last) <= 65504.0f;
  bool lossy = false;
  std::byte* values = target + chunk_offset(kChunks + own, t, subtile_tokens);
#pragma unroll 2
  for (int i = 0; i < kOwnChunks; ++i) {
    const int chunk = own + i * kLanesOfToken;
    const uint32_t codes = chunk_codes<kValueBits>(row, phase + kSlot.value_offset(), chunk);
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Two codes to the halves of a word by one product, under the exponent of 1024.
      constexpr uint32_t kMask = (1 << kValueBits) - 1;
      const uint32_t two = code_pair<kValueBits>(codes, e);
      const uint32_t spread = two * ((1u << (16 - kValueBits)) + 1) & half2_broadcast(kMask);
      const uint32_t exact = half2_add(spread | 0x64006400u, 0xe400e400u);
      words[e] = half2_fma(exact, scale2, zero2);
    }
    if (!plain) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t code = (codes >> ((2 * e + h) * kValueBits)) & ((1 << kValueBits) - 1);
          x[h] = fmaf(static_cast<float>(code), scale, zero);
          lossy |= !isfinite(x[h]);
          // A finite value beyond fp16 saturates: an infinity would not be its nearest element.
          x[h] = isfinite(x[h]) ? fminf(fmaxf(x[h], -65504.0f), 65504.0f) : 0.0f;
        }
        words[e] = ptx::cvt_half2(x[0], x[1]);
      }
    }
    store_chunk(values + chunk_offset(i * kLanesOfToken, 0, subtile_tokens), words);
  }
  return lossy;
}

// The raw tokens of a key block, a warp a token: rotated like queries and rounded like everything
// in the image. True if a value element is not finite.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ bool round_raw(const TileParams& params,
                                          const TokenSource (&sources)[kFillTokens], int head,
                                          std::byte* target) {
  constexpr int kPer = kHeadDim / 32;
  const AttentionParams& call = params.call;
  const int subtile_tokens = params.plan.shape.block_tokens;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Finite elements beyond fp16 saturate, as the store's norms and values do.
  const auto saturate = [](float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); };
  bool lossy = false;
  for (int token = warp; token < kFillTokens; token += kWarps) {
    const int64_t chunk_token = sources[token].chunk_token;
    if (chunk_token < 0) continue;
    float x[kPer], value[kPer];
    load_elements(
        call.chunk_key, call.dtype,
        chunk_token * call.chunk_key_stride_token + head * call.chunk_key_stride_head + kPer * lane,
        x);
    load_elements(call.chunk_value, call.dtype,
                  chunk_token * call.chunk_value_stride_token +
                      head * call.chunk_value_stride_head + kPer * lane,
                  value);
    if (params.format.rotated()) rotate_row<kPer>(x);
#pragma unroll
    for (int e = 0; e < kPer; e += 2) {
      const float a = isfinite(x[e]) ? saturate(x[e]) : x[e];
      const float b = isfinite(x[e + 1]) ? saturate(x[e + 1]) : x[e + 1];
      const int d = kPer * lane + e;
      *reinterpret_cast<uint32_t*>(target + chunk_offset(d / 8, token, subtile_tokens) +
                                   d % 8 * 2) = ptx::cvt_half2(a, b);
    }
#pragma unroll
    for (int e = 0; e < kPer; e += 2) {
      const int d = kPer * lane + e;
      float a = value[e], b = value[e + 1];
      lossy |= !isfinite(a) || !isfinite(b);
      a = isfinite(a) ? saturate(a) : 0.0f;
      b = isfinite(b) ? saturate(b) : 0.0f;
      *reinterpret_cast<uint32_t*>(
          target + chunk_offset((kHeadDim + d) / 8, token, subtile_tokens) + d % 8 * 2) =
          ptx::cvt_half2(a, b);
    }
  }
  return lossy;
}

// Which tokens of a key block have a value element that is not finite, by dimension.
template <int kValueBits>
__device__ void name_lost_tokens(const AttentionParams& call, const SlotFormat& format,
                                 const TokenSource (&sources)[kFillTokens], int head,
                                 const uint32_t* rows, int pitch, uint64_t* lost_tokens) {
  for (int d = threadIdx.x; d < format.head_dim; d += blockDim.x) {
    uint64_t tokens = 0;
    for (int token = 0; token < kFillTokens; ++token) {
      const TokenSource from = sources[token];
      bool lost = false;
      if (from.chunk_token >= 0) {
        lost = !isfinite(load_element(call.chunk_value, call.dtype,
                                      from.chunk_token * call.chunk_value_stride_token +
                                          head * call.chunk_value_stride_head + d));
      } else if (from.slot != nullptr) {
        const int at = static_cast<int>(reinterpret_cast<uintptr_t>(from.slot) & 2);
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

template <int kKeyBits, int kValueBits, int kHeadDim>
__global__ void __launch_bounds__(fill_threads(kHeadDim), fill_blocks_of_sm(kHeadDim))
    tile_fill_kernel(const __grid_constant__ TileParams params,
                     const __grid_constant__ TileStep at) {
  constexpr int kThreads = fill_threads(kHeadDim);
  constexpr int kWarps = kThreads / 32;
  constexpr int kSlotBytes = fill_format(kKeyBits, kValueBits, kHeadDim).slot_bytes();
  constexpr int kPitch = fill_pitch(kSlotBytes);
  constexpr int kRowsWords = kFillTokens * kPitch;
  constexpr int kPairs = fill_pairs(kKeyBits);
  extern __shared__ __align__(16) std::byte dynamic[];
  auto* pairs = reinterpret_cast<LevelPair*>(dynamic);                     // [pair of codes][copy]
  auto* rows = reinterpret_cast<uint32_t*>(pairs + kPairs * kPairCopies);  // [2][64][pitch]
  __shared__ TokenSource sources[2][kFillTokens];
  __shared__ int pages[kFillTokens], following;
  __shared__ float squares[kWarps / 2][kFillTokens];
  const AttentionParams& call = params.call;
  const TilePlan& plan = params.plan;
  auto* contexts = reinterpret_cast<FillContext*>(rows + 2 * kRowsWords);
  const bool describes = threadIdx.x < kFillTokens;

#if __CUDA_ARCH__ >= 900
  ptx::grid_dependency_launch();  // the attention over this tile: it waits for us
#endif
  for (int i = threadIdx.x; i < kPairs * kPairCopies; i += kThreads) {
    const int pair = i / kPairCopies;
    const float a = params.levels[pair % (1 << kKeyBits)], b = params.levels[pair >> kKeyBits];
    pairs[i] = {ptx::cvt_half2(a, b), fmaf(a, a, b * b)};
  }
  const GroupRows group = group_rows(plan, params.sequences(), at.context_group, at.row_chunk);
  const auto num_contexts = static_cast<int>(group.end_context - group.first_context);
  for (int c = threadIdx.x; c < num_contexts; c += kThreads) {
    contexts[c] = fill_context(params, at, group, c);
  }
  __syncthreads();

  // Key blocks are numbered through all contexts; the next one that holds a visible key.
  const int per_context = plan.fill_blocks(), end = num_contexts * per_context;
  const auto context_of = [&](int work) {
    return static_cast<int>(plan.block_divisor.divide(static_cast<uint32_t>(work)));
  };
  const auto used_from = [&](int work) {
    for (; work < end; work += gridDim.x) {
      const int index = context_of(work), block = work - index * per_context;
      const int first = contexts[index].first + block * kFillTokens;
      if (first >= contexts[index].filled_end) continue;
      if (first + kFillTokens > contexts[index].filled_begin) break;
      if (threadIdx.x == 0) params.flags(at.buffer, index)[block] = 0;
    }
    return min(work, end);
  };
  const auto own_token = [&](int work, const FillContext& context, int index) {
    return context.first + (work - index * per_context) * kFillTokens +
           static_cast<int>(threadIdx.x);
  };
  // A thread reads the page of its own token, so that its own wait is enough before describe().
  const auto look_up = [&](int work) {
    if (describes && work < end) {
      const int index = context_of(work);
      const FillContext& context = contexts[index];
      const int64_t entry = token_index(call, context, own_token(work, context, index));
      if (entry >= 0) {
        ptx::cp_async<4>(ptx::shared_address(&pages[threadIdx.x]),
                         call.table_row(context.seq) + entry);
      }
    }
    ptx::cp_async_commit();
  };
  const auto describe = [&](int work, int buffer) {
    if (!describes || work >= end) return false;
    const int index = context_of(work);
    const FillContext& context = contexts[index];
    const TokenSource source =
        token_source(call, context, own_token(work, context, index), pages[threadIdx.x]);
    sources[buffer][threadIdx.x] = source;
    return source.chunk_token >= 0;
  };
  const auto copy = [&](int work, int buffer) {
    if (work < end) {
      copy_rows<kWarps, kSlotBytes>(sources[buffer],
                                    ptx::shared_address(rows + buffer * kRowsWords));
    }
    ptx::cp_async_commit();
  };

  int work = used_from(blockIdx.x), next = used_from(work + gridDim.x);
  look_up(work);
  ptx::cp_async_wait<0>();
  bool raw = describe(work, 0);
  look_up(next);
  __syncthreads();
  copy(work, 0);
#if __CUDA_ARCH__ >= 900
  // The attention over the tile before reads the one image there is; nothing was written to it so
  // far: only the first step of a launch group may begin with blocks that no row sees. The
  // attention of the launch group before has ended.
  if (plan.buffers == 1 && at.step > 0) ptx::grid_dependency_wait();
#endif
  for (int buffer = 0; work < end; buffer ^= 1) {
    ptx::cp_async_wait<0>();
    const bool raw_next = describe(next, buffer ^ 1);
    const bool raw_here = __syncthreads_or(raw);
    copy(next, buffer ^ 1);
    if (describes) {
      const int after = used_from(next + gridDim.x);
      look_up(after);
      if (threadIdx.x == 0) following = after;
    }

    const int context = context_of(work), block = work - context * per_context;
    const int head = contexts[context].head;
    const int subtile_tokens = plan.shape.block_tokens;  // a power of two
    const int first_token = block * kFillTokens & (subtile_tokens - 1);
    std::byte* target = params.image(at.buffer, context) +
                        (block * kFillTokens - first_token) * subtile_bytes(1, kHeadDim) +
                        chunk_offset(0, first_token, subtile_tokens);
    const uint32_t* own_rows = rows + buffer * kRowsWords;
    const int token = threadIdx.x % kFillTokens;
    bool lossy = dequantise<kKeyBits, kValueBits, kHeadDim, kWarps>(
        params, pairs, squares, sources[buffer][token], own_rows + token * kPitch, target);
    if (raw_here) {
      lossy |= round_raw<kHeadDim, kWarps>(params, sources[buffer], head, target);
    }
    lossy = __syncthreads_or(lossy);
    if (threadIdx.x == 0) params.flags(at.buffer, context)[block] = lossy;
    if (lossy) {
      name_lost_tokens<kValueBits>(
          call, params.format, sources[buffer], head, own_rows, kPitch,
          params.lost_tokens(at.buffer, context) + static_cast<int64_t>(block) * kHeadDim);
      __syncthreads();
    }
    raw = raw_next;
    work = next;
    next = following;
  }
#if __CUDA_ARCH__ >= 900
  // The attention over the tile before reads the other of two buffers: it must have ended before
  // the next launch, which fills that buffer again, may begin.
  ptx::grid_dependency_wait();
#endif
}

}  // namespace kvtile::cuda
