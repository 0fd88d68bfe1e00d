// Frozen codebooks: Lloyd-Max levels and decision bounds for N(0, 1/head_dim), bit for bit those
// the TurboQuant store writes (checked against the golden vectors). Never recomputed: a solver's
// last bit is a compatibility break. Levels and bounds are symmetric, so only the positive half is
// listed; the middle bound is 0 (ties go up: y >= bound). Halving sigma is exact in binary, so one
// table each for even and odd log2(head_dim) serves every power of two.
#pragma once

#include <array>

#include "kvtile/slot.h"
#include "src/core/hd.h"

namespace kvtile {

inline constexpr float kLevels4D64[8] = {
    0x1.070514p-6f, 0x1.8d73fep-5f, 0x1.50529p-4f, 0x1.e28894p-4f,
    0x1.419a18p-3f, 0x1.9e2d8p-3f,  0x1.08c2ep-2f, 0x1.5d8edcp-2f,
};
inline constexpr float kBounds4D64[7] = {
    0x1.087b44p-5f, 0x1.0b8648p-4f, 0x1.996d92p-4f, 0x1.196f3p-3f,
    0x1.6fe3ccp-3f, 0x1.d7d9ap-3f,  0x1.3328dep-2f,
};
inline constexpr float kLevels4D128[8] = {
    0x1.73f75cp-7f, 0x1.190ab2p-5f, 0x1.dba1c2p-5f, 0x1.5533e4p-4f,
    0x1.c6d056p-4f, 0x1.24de2ep-3f, 0x1.766dcep-3f, 0x1.ee5988p-3f,
};
inline constexpr float kBounds4D128[7] = {
    0x1.760888p-6f, 0x1.7a563ap-5f, 0x1.218262p-4f, 0x1.8e021cp-4f,
    0x1.04232cp-3f, 0x1.4da5fep-3f, 0x1.b263acp-3f,
};
inline constexpr float kLevels3D64[4] = {
    0x1.f5b9f6p-6f,
    0x1.82e3f8p-4f,
    0x1.57daa6p-3f,
    0x1.133ea8p-2f,
};
inline constexpr float kBounds3D64[3] = {
    0x1.00293ap-4f,
    0x1.0ca65p-3f,
    0x1.bf2bfcp-3f,
};
inline constexpr float kLevels3D128[4] = {
    0x1.62c62ep-6f,
    0x1.1192aap-4f,
    0x1.e6487ap-4f,
    0x1.85413ep-3f,
};
inline constexpr float kBounds3D128[3] = {
    0x1.6a4436p-5f,
    0x1.7bed92p-4f,
    0x1.3c32bep-3f,
};

// 2^shift exactly, for |shift| < 127.
KVTILE_HD constexpr float power_of_two(int shift) {
  float x = 1.0f;
  for (; shift > 0; --shift) x *= 2.0f;
  for (; shift < 0; ++shift) x *= 0.5f;
  return x;
}

KVTILE_HD constexpr int log2_int(int n) {
  int log = 0;
  while (n > 1) {
    n >>= 1;
    ++log;
  }
  return log;
}

// Levels in code order, 2^key_bits of them (the rest of the 16 repeats them, so that a lookup may
// ignore the bits above a 3-bit code), and the 2^key_bits - 1 ascending decision bounds.
struct Codebook {
  float levels[16] = {};
  float bounds[15] = {};
  int num_levels = 0;
};

constexpr Codebook make_codebook(KeyCode key, int head_dim) {
  Codebook book;
  const bool odd = (log2_int(head_dim) & 1) != 0;
  const bool four = key == KeyCode::kLloydMax4;
  const float* levels =
      four ? (odd ? kLevels4D128 : kLevels4D64) : (odd ? kLevels3D128 : kLevels3D64);
  const float* bounds =
      four ? (odd ? kBounds4D128 : kBounds4D64) : (odd ? kBounds3D128 : kBounds3D64);
  const float scale = power_of_two(((odd ? 7 : 6) - log2_int(head_dim)) / 2);
  const int half = four ? 8 : 4;
  book.num_levels = 2 * half;
  for (int i = 0; i < 16; ++i) {
    const int code = i % (2 * half);
    book.levels[i] = scale * (code >= half ? levels[code - half] : -levels[half - 1 - code]);
  }
  for (int i = 0; i < half - 1; ++i) {
    book.bounds[half + i] = scale * bounds[i];
    book.bounds[half - 2 - i] = -scale * bounds[i];
  }
  return book;
}

}  // namespace kvtile
