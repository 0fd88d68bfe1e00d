// What an instance of the rows kernel is: its format, its rows, and the sizes that follow.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvtile/slot.h"
#include "src/attention/cuda/rows_plan.h"

namespace kvtile::cuda {

// The architecture that device code is compiled for; host code reads no size that depends on it.
#if defined(__CUDA_ARCH__)
inline constexpr bool kRowsWide = rows_wide_table(__CUDA_ARCH__ / 10);
#else
inline constexpr bool kRowsWide = true;
#endif

// kTiles: MMA column tiles (8 rows). A team of one, two or four warps shares its rows: each warp
// scores its own 16 tokens and accumulates its share of the value dimensions for the tokens of the
// whole team.
template <KeyCode kKeyCode, ValueCode kValueCode, int kDim, int kColumnTiles>
struct RowsConfig {
  static constexpr KeyCode kKey = kKeyCode;
  static constexpr ValueCode kValue = kValueCode;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTiles = kColumnTiles;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kTeamWarps = rows_team_warps(kDim, kRows);
  static constexpr int kWarpDims = kDim / kTeamWarps;
  static constexpr SlotFormat kFormat{kDim, kKeyCode, kValueCode, true};
  static constexpr int kSlotBytes = kFormat.slot_bytes();
  static constexpr int kNormOffset = kFormat.norm_offset();
  static constexpr int kValueOffset = kFormat.value_offset();
  static constexpr int kScaleOffset = kFormat.scale_offset();
  static constexpr int kZeroOffset = kFormat.zero_offset();
  // FP8 slots are whole words, and read as such; rows of pools that are not are moved by half
  // words.
  static constexpr int kSlotAlignment = rows_slot_alignment(kKeyCode);
  static constexpr RowsSizes kSizes = rows_sizes(kFormat, kRows, kRowsWide);
  static constexpr int kGranules = rows_granules(kSlotBytes);
  static constexpr int kPitch = rows_pitch(kSlotBytes);
  static constexpr int kStages = rows_stages(kDim);
  static constexpr int kStageBytes = rows_stage_bytes(kSlotBytes);
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kScratchBytes = rows_team_scratch_bytes(kDim, kRows);
  static constexpr int kWeightBytes = kTiles * 256;  // of one warp and group
  static constexpr bool kQueryInRegisters = kDim * kTiles <= 128;
  static constexpr int kMaxThreads = 32 * rows_max_warps(kDim, kRows);
};

}  // namespace kvtile::cuda
