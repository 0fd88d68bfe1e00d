// The tile image: where a dequantised key or value element lives. A sub-tile of N tokens of one KV
// head is stored as 16-byte chunks of eight fp16 dimensions, chunk-major: chunk c of token t is at
// (c * N + t) * 16. Eight tokens of a chunk are 128 contiguous bytes, so the same bytes serve
// ldmatrix without bank conflicts, the no-swizzle wgmma operand, one bulk copy a stage, and
// coalesced one-token-per-lane stores. An image is [head][sub-tile][key, value][chunk][token][8].
#pragma once

#include <cstdint>

#include "kvtile/slot.h"
#include "src/core/hd.h"
#include "src/core/matrix_descriptor.h"

namespace kvtile::cuda {

inline constexpr int kChunkDims = 8;
inline constexpr int kChunkBytes = 16;

// The one owner of an address inside a sub-tile (bytes).
KVTILE_HD constexpr int chunk_offset(int chunk, int token, int subtile_tokens) {
  return (chunk * subtile_tokens + token) * kChunkBytes;
}

// Levels of unit variance times this are fp16 numbers to a relative 7.4e-5, a sixth of fp16's own
// rounding.
constexpr float level_factor(KeyCode key) {
  return key == KeyCode::kLloydMax4 ? 0x1.bbccp0f : 0x1.42bcp0f;
}

// Key or value of one sub-tile; the value follows the key.
KVTILE_HD constexpr int plane_bytes(int subtile_tokens, int head_dim) {
  return subtile_tokens * head_dim * 2;
}

KVTILE_HD constexpr int64_t subtile_bytes(int subtile_tokens, int head_dim) {
  return 2 * static_cast<int64_t>(plane_bytes(subtile_tokens, head_dim));
}

KVTILE_HD constexpr int64_t image_bytes(int64_t tokens, int subtile_tokens, int head_dim) {
  return (tokens + subtile_tokens - 1) / subtile_tokens * subtile_bytes(subtile_tokens, head_dim);
}

// A plane as a wgmma operand, k running along the dimensions (keys) or the tokens (values).
KVTILE_HD constexpr ptx::MatrixPitch key_operand(int subtile_tokens) {
  return {chunk_offset(1, 0, subtile_tokens), chunk_offset(0, 8, subtile_tokens)};
}
KVTILE_HD constexpr ptx::MatrixPitch value_operand(int subtile_tokens) {
  return {chunk_offset(0, 8, subtile_tokens), chunk_offset(1, 0, subtile_tokens)};
}

// Element addresses cover a plane exactly once.
template <int kTokens, int kHeadDim>
constexpr bool chunk_offset_is_bijective() {
  bool seen[kTokens * kHeadDim / kChunkDims] = {};
  for (int chunk = 0; chunk < kHeadDim / kChunkDims; ++chunk) {
    for (int token = 0; token < kTokens; ++token) {
      const int offset = chunk_offset(chunk, token, kTokens);
      if (offset % kChunkBytes != 0 || offset >= plane_bytes(kTokens, kHeadDim)) return false;
      if (seen[offset / kChunkBytes]) return false;
      seen[offset / kChunkBytes] = true;
    }
  }
  return true;
}
static_assert(chunk_offset_is_bijective<64, 64>());
static_assert(chunk_offset_is_bijective<32, 128>());
// The eight rows an ldmatrix reads are one bank-conflict-free line of 128 bytes.
static_assert(chunk_offset(3, 8, 64) - chunk_offset(3, 0, 64) == 128);

}  // namespace kvtile::cuda
