// Sizes of the fp32 tiles that unpack-inl.h writes, for whoever allocates them. One owner:
// workspace formula, engine and codec all call these.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtile {

// Keys processed at a time; also the softmax block of the engine (docs/numerics.md).
inline constexpr int kTileTokens = 128;
// Tokens whose value words are staged together.
inline constexpr int kValueBatch = 16;

// Coordinates a score adds up in one chain before the chain joins the sum: bounds the rounding of
// long rows of equal products.
inline constexpr int kScoreChain = 64;

// Tokens [begin, end) of a tile.
struct TokenSpan {
  int begin, end;
  constexpr bool contains(size_t t) const {
    return t >= static_cast<size_t>(begin) && t < static_cast<size_t>(end);
  }
};

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int64_t round_up64(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The widest vector any target uses, in fp32 lanes; scratch is sized for it so that its size does
// not depend on the machine.
inline constexpr int kMaxLanes = 16;

// Value rows are in planar order: column j * (head_dim / 8) + w holds coordinate 8 * w + j, the
// order in which shifting a vector of packed words by j codes yields it.
constexpr int value_column(int head_dim, int d) { return (d % 8) * (head_dim / 8) + d / 8; }
constexpr int value_pitch(int head_dim, int lanes) { return round_up(head_dim, lanes) + lanes; }

constexpr int64_t key_tile_floats(int head_dim) { return int64_t{kTileTokens} * head_dim; }
constexpr int64_t value_tile_floats(int head_dim) {
  return int64_t{kTileTokens} * value_pitch(head_dim, kMaxLanes);
}
// Staging for packed value words, a padded row for each token of a batch.
constexpr int64_t tile_words(int head_dim) {
  return int64_t{kValueBatch} * (head_dim / 8 + kMaxLanes);
}

}  // namespace kvtile
