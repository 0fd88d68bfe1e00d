// How long a call takes on a CUDA device, estimated from its shape and hints alone: one closed form
// for each engine, with constants measured on an H200 (docs/kernels/choice.md) and scaled by
// the device's size. Backend "cuda" takes the cheapest engine; all estimates grow with the rows and
// with the context.
#pragma once

#include <cstdint>

#include "kvtile/attention.h"
#include "src/attention/cuda/sm80/tile_plan.h"
#include "src/core/device.h"

namespace kvtile::cuda {

// Packed rows (query x head of the group) of one sequence that the rows engine takes. It reads the
// slots again for every 32 of them, so the tile engine has won long before.
inline constexpr int64_t kRowsMaxPackedRows = 256;

// The most query rows one sequence of the call can have.
int64_t largest_q_len(const AttentionCall& call);
int64_t largest_packed_rows(const AttentionCall& call);
// kUnsupported, naming max_q_len, above kRowsMaxPackedRows.
Status check_packed_rows(const AttentionCall& call);

// Microseconds of a call whose sequences all have seq_len tokens and the largest q_len.
double rows_cost_us(const AttentionCall& call, int64_t seq_len, const DeviceInfo& device);
double tile_cost_us(TileEngine engine, const AttentionCall& call, int64_t seq_len,
                    const DeviceInfo& device);

// The cheaper tile engine is the device's own at every shape.
TileEngine cheaper_tile(const DeviceInfo& device);

// Whether the rows engine is the cheaper one at kChoiceTokens of context. The choice does not
// follow the call's lengths: a workspace then serves every length, and a growing context never
// changes engines half way. Where they cross (about 200 packed rows) the context hardly moves it.
// Once false it stays false for more query rows: a workspace serves smaller calls too.
inline constexpr int64_t kChoiceTokens = 32768;
bool rows_are_cheaper(const AttentionCall& call, const DeviceInfo& device);

}  // namespace kvtile::cuda
