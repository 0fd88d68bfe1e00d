// How wgmma is told where a matrix in shared memory lies, without swizzle. It is made of core
// matrices of 128 contiguous bytes: eight rows of eight 2-byte elements. A row runs along k where
// the matrix is k-major (queries, keys) and across k where it is transposed (values).
#pragma once

#include <cstdint>

#include "src/core/hd.h"

namespace kvtile::ptx {

// Distances between neighbouring core matrices in bytes: along k, and across it.
struct MatrixPitch {
  int along_k, across_k;
};

// `address` is a multiple of 16 below 2^18.
KVTILE_HD constexpr uint64_t matrix_descriptor(uint32_t address, MatrixPitch pitch) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffff) >> 4); };
  return field(address) | field(static_cast<uint32_t>(pitch.along_k)) << 16 |
         field(static_cast<uint32_t>(pitch.across_k)) << 32;
}

// The same matrix so many bytes further on.
KVTILE_HD constexpr uint64_t advance(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}

}  // namespace kvtile::ptx
