// Bucketising by one lookup: the real line is cut into cells no wider than the gap between two
// decision bounds, so a cell holds at most one bound and a coordinate's code is the number of
// bounds in lower cells plus one comparison with the cell's own. Exact whatever the rounding of the
// cell index: it is monotone, and the comparison uses the coordinate itself.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "src/codec/codebook.h"
#include "src/core/hd.h"

namespace kvtile {

inline constexpr int kNumCells = 32;

// Cells are 0.1868 sigma wide and centred on 0; with that width every bound lies at least a tenth
// of a cell inside its own. The index is 15 + y / width, rounded and clamped to 0..30.
inline constexpr uint32_t kLastCell = 30;

// Codebooks are for sigma = 1 / sqrt(head_dim); the cells cover 5.604 sigma.
inline float cell_slope(int head_dim) { return std::sqrt(static_cast<float>(head_dim)) / 5.604f; }

KVTILE_HD inline uint32_t cell_index(float y, float slope) {
#if defined(__CUDA_ARCH__)
  // A product with 30 of the smallest subnormals: rounding it leaves the integer as the float's
  // bits.
  const float u = __saturatef(__fmaf_rn(y, slope, 0.5f));
  return __float_as_uint(__fmul_rn(u, __uint_as_float(kLastCell)));
#else
  const float u = std::fma(y, slope, 0.5f);
  const double clamped = u > 1.0f ? 1.0 : (u > 0.0f ? u : 0.0);
  return static_cast<uint32_t>(std::nearbyint(clamped * kLastCell));
#endif
}

struct alignas(8) Cell {
  float bound;    // infinity where no bound lies in the cell
  uint32_t code;  // number of bounds in lower cells
};

struct CellTable {
  Cell cells[kNumCells];
};

inline CellTable make_cell_table(const Codebook& book, float slope) {
  CellTable table;
  for (uint32_t c = 0; c < kNumCells; ++c) {
    table.cells[c] = {HUGE_VALF, 0};
    for (int b = 0; b < book.num_levels - 1; ++b) {
      const uint32_t cell = cell_index(book.bounds[b], slope);
      if (cell < c) ++table.cells[c].code;
      if (cell == c) table.cells[c].bound = book.bounds[b];
    }
  }
  return table;
}

}  // namespace kvtile
