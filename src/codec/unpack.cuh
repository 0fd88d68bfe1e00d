// Packed codes to fp16 pairs in registers. Every function is written once for device and host: on
// the device it is the instruction sequence the kernels budget for, on the host the same steps run
// over emulated PRMT and fp16 arithmetic, so that the CPU tests are exhaustive over the real text.
// Inputs are 32-bit words of packed codes, least significant code first; outputs are packed fp16.
#pragma once

#include <cstdint>

#include "src/codec/codebook.h"
#include "src/core/half2.h"
#include "src/core/hd.h"

#if defined(__CUDACC__)
#include "src/core/ptx.cuh"
#endif

namespace kvtile {

// Byte permute: each selector nibble picks a byte of {b, a} by its low three bits; its top bit asks
// for that byte's sign, replicated.
KVTILE_HD inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return ptx::prmt(a, b, selector);
#else
  const uint64_t source = (static_cast<uint64_t>(b) << 32) | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = (selector >> (4 * i)) & 15;
    uint32_t byte = static_cast<uint32_t>(source >> (8 * (nibble & 7))) & 0xff;
    if ((nibble & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0x00;
    result |= byte << (8 * i);
  }
  return result;
#endif
}

// The low word of {high, low} >> bits, bits in 0..31. Realigns a row whose bytes start in the
// middle of a word: slots are only 2-byte aligned, so bits is 0 or 16.
KVTILE_HD inline uint32_t shift_words(uint32_t low, uint32_t high, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (bits & 31));
#endif
}

// (word & mask) | bits as the one instruction it is: left to itself the compiler spends two.
KVTILE_HD inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return ptx::lop3<0xea>(word, mask, bits);
#else
  return (word & mask) | bits;
#endif
}

// Eight 3-bit codes (low 24 bits; the rest is ignored) to eight nibbles.
KVTILE_HD inline uint32_t expand_3bit(uint32_t x) {
  x &= 0x00ffffffu;
  x += 15 * (x & 0x00fff000u);
  x += 3 * (x & 0x0fc00fc0u);
  x += x & 0x38383838u;
  return x;
}

// Eight nibbles to code - kCentre in fp16, exact; pairs[j] holds codes j and j + 4. kCentre 0 gives
// the codes. 8 (4-bit) and 4 (3-bit) centre them, so that the sums of probability * code and of
// probability * zero do not cancel: value = code' * scale + (zero + kCentre * scale).
// A nibble under the exponent of 1024 reads 1024 + code, one in the upper half of a byte
// 1024 + 16 code.
template <int kCentre>
KVTILE_HD inline void nibbles_to_codes(uint32_t nibbles, uint32_t (&pairs)[4]) {
  static_assert(kCentre == 0 || kCentre == 4 || kCentre == 8);
  constexpr uint32_t kMagic = 0x64006400u;
  constexpr uint16_t kSixteenth = 0x2c00;
  constexpr uint16_t kLowOffset = 0xe400 + kCentre;        // -(1024 + kCentre)
  constexpr uint16_t kHighOffset = 0xd400 + 16 * kCentre;  // -(64 + kCentre)
  const uint32_t upper = nibbles >> 8;
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = i == 0 ? nibbles : upper;
    pairs[2 * i] = half2_add(and_or(word, 0x000f000fu, kMagic), half2_broadcast(kLowOffset));
    pairs[2 * i + 1] = half2_fma(and_or(word, 0x00f000f0u, kMagic), half2_broadcast(kSixteenth),
                                 half2_broadcast(kHighOffset));
  }
}

// The codebook as two byte planes of eight fp16 magnitudes (4-bit, symmetric) or eight fp16 levels
// (3-bit): byte i of {words[0], words[1]} belongs to index i.
struct LevelPlanes {
  uint32_t high[2] = {};  // sign, exponent and top mantissa bits
  uint32_t low[2] = {};
};

// Levels times `factor`, rounded to fp16. A factor near 1.33 (4-bit) or 1.61 (3-bit) places the
// levels where fp16 happens to round them least.
inline LevelPlanes make_level_planes(KeyCode key, int head_dim, float factor) {
  const Codebook book = make_codebook(key, head_dim);
  LevelPlanes planes;
  for (int i = 0; i < 8; ++i) {
    const float level = key == KeyCode::kLloydMax4 ? book.levels[8 + i] : book.levels[i];
    const uint16_t half = float_to_half_bits(level * factor);
    planes.high[i / 4] |= static_cast<uint32_t>(half >> 8) << (8 * (i % 4));
    planes.low[i / 4] |= static_cast<uint32_t>(half & 0xff) << (8 * (i % 4));
  }
  return planes;
}

// Eight nibbles of 4-bit codes to fp16 levels; pairs[j] holds codes 2j and 2j + 1. The packed word
// is the selector: codes 8..15 pick magnitude code - 8, codes 0..7 pick 7 - code and turn negative.
KVTILE_HD inline void lookup_levels_4bit(uint32_t nibbles, const LevelPlanes& planes,
                                         uint32_t (&pairs)[4]) {
  const uint32_t positive = nibbles & 0x88888888u;
  const uint32_t low_codes = 0x77777777u - (positive - (positive >> 3));  // 7 per code below 8
  const uint32_t selector = (nibbles ^ low_codes) & 0x77777777u;
  for (int half = 0; half < 2; ++half) {
    const uint32_t select = half == 0 ? selector : selector >> 16;
    const uint32_t codes = half == 0 ? nibbles : nibbles >> 16;
    // 0x40 where the code is below 8, 0 elsewhere: the selector's top bit replicates a clear sign.
    const uint32_t negative = permute_bytes(0x40404040u, 0x40404040u, codes);
    const uint32_t high = permute_bytes(planes.high[0], planes.high[1], select) + 2 * negative;
    const uint32_t low = permute_bytes(planes.low[0], planes.low[1], select);
    pairs[2 * half] = permute_bytes(low, high, 0x5140);
    pairs[2 * half + 1] = permute_bytes(low, high, 0x7362);
  }
}

// Eight nibbles of 3-bit codes (see expand_3bit) to fp16 levels; pairs[j] holds 2j and 2j + 1.
KVTILE_HD inline void lookup_levels_3bit(uint32_t nibbles, const LevelPlanes& planes,
                                         uint32_t (&pairs)[4]) {
  for (int half = 0; half < 2; ++half) {
    const uint32_t select = half == 0 ? nibbles : nibbles >> 16;
    const uint32_t high = permute_bytes(planes.high[0], planes.high[1], select);
    const uint32_t low = permute_bytes(planes.low[0], planes.low[1], select);
    pairs[2 * half] = permute_bytes(low, high, 0x5140);
    pairs[2 * half + 1] = permute_bytes(low, high, 0x7362);
  }
}

// Four FP8 bytes to fp16, exact for all 256 codes of both flavours; pairs[0] holds bytes 0 and 1.
// The shift form serves every architecture; e4m3 keeps its NaN (0x7f, 0xff).
KVTILE_HD inline void fp8_to_half2_shift(KeyCode key, uint32_t bytes, uint32_t (&pairs)[2]) {
  for (int i = 0; i < 2; ++i) {
    const uint32_t spread = permute_bytes(bytes, 0, i == 0 ? 0x1404 : 0x3424);
    const uint32_t magnitude = (spread >> 1) & 0x3f803f80u;
    const uint32_t sign = spread & 0x80008000u;
    if (key == KeyCode::kFp8E4B15) {
      pairs[i] = magnitude | sign;
    } else {
      // 0x7f alone carries into bit 14; with the exponent bits below it all ones, that is a NaN.
      const uint32_t nan = (magnitude + 0x00800080u) & 0x40004000u;
      pairs[i] = half2_mul(magnitude | nan | sign, half2_broadcast(0x5c00));  // x 2^8
    }
  }
}

KVTILE_HD inline void fp8_to_half2(KeyCode key, uint32_t bytes, uint32_t (&pairs)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if (key == KeyCode::kFp8E4M3) {
    pairs[0] = ptx::cvt_e4m3x2_to_half2(static_cast<uint16_t>(bytes));
    pairs[1] = ptx::cvt_e4m3x2_to_half2(static_cast<uint16_t>(bytes >> 16));
    return;
  }
#endif
  fp8_to_half2_shift(key, bytes, pairs);
}

}  // namespace kvtile
