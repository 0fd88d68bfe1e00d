// The cost estimates. A token-head is one cached token of one KV head.
#include "src/attention/cuda/cost.h"

#include <algorithm>

#include "src/attention/cuda/rows_plan.h"
#include "src/attention/cuda/sm80/tile_plan.h"
#include "src/core/status.h"

namespace kvtile::cuda {
namespace {

// Measured on an H200. Time of an SM is in ns x SM: what all SMs together spend.
constexpr double kRowsFixedUs = 20.0;     // launches, first pages, combine
constexpr double kRowsSmNs = 1.5;         // a token-head, 128 dimensions, of any tile
constexpr double kRowsSmNsPerRow = 0.41;  // and for each row of the tile's capacity
constexpr double kRowsWgmmaSmNs = 3.7;    // the same of more than eight rows by wgmma
constexpr double kRowsWgmmaSmNsPerRow = 0.26;
constexpr double kRowsRawFlopsPerSmNs = 64.0;   // the raw chunk, in plain fp32
constexpr double kTileFixedUs = 30.0;           // a dozen launches
constexpr double kTileGroupUs = 10.0;           // a launch group of about one row block per SM
constexpr double kTileFillSmNs = 65.0;          // dequantising a token-head, 128 dimensions
constexpr double kTileFlopsPerSmNs = 2800.0;    // attention over the image, portable
constexpr double kHopperFlopsPerSmNs = 5000.0;  // and with wgmma

int group_of(const AttentionCall& call) { return call.num_heads / call.cache.num_kv_heads; }

double token_heads(const AttentionCall& call, int64_t seq_len) {
  int64_t visible = seq_len;
  if (call.mask.window > 0) visible = std::min(visible, call.mask.window + largest_q_len(call));
  return static_cast<double>(visible) * call.num_seqs * call.cache.num_kv_heads;
}

double wide(const AttentionCall& call) { return call.cache.format.head_dim / 128.0; }

}  // namespace

int64_t largest_q_len(const AttentionCall& call) {
  return call.max_q_len > 0 ? std::min(call.max_q_len, call.total_q) : call.total_q;
}

int64_t largest_packed_rows(const AttentionCall& call) {
  return largest_q_len(call) * group_of(call);
}

Status check_packed_rows(const AttentionCall& call) {
  if (largest_packed_rows(call) <= kRowsMaxPackedRows) return {};
  return unsupported("max_q_len", largest_q_len(call),
                     fmt::format("at most {} packed rows of a KV head, {} for each query, on "
                                 "backend cuda/rows",
                                 kRowsMaxPackedRows, group_of(call)));
}

double rows_cost_us(const AttentionCall& call, int64_t seq_len, const DeviceInfo& device) {
  const SlotFormat& format = call.cache.format;
  const int64_t q_len = largest_q_len(call);
  RowsShape shape;
  shape.num_seqs = call.num_seqs;
  shape.max_q_len = q_len;
  shape.group = group_of(call);
  shape.head_dim = format.head_dim;
  const int queries = rows_queries_per_tile(shape);
  const int heads = std::min(shape.group, shape.max_rows);
  const int rows = rows_capacity(queries * heads);
  const int64_t tiles = ((q_len + queries - 1) / queries) * ((shape.group - 1) / heads + 1);

  const double slots = token_heads(call, seq_len);
  const double bytes_ns = slots * format.slot_bytes() / device.copy_gb_per_s;
  // Not whether a call's addresses suit that kernel: the choice must not follow them.
  const bool wgmma = device.arch == 90 && rows > kRowsPagesRows;
  const double slot_ns =
      wgmma ? kRowsWgmmaSmNs + kRowsWgmmaSmNsPerRow * rows : kRowsSmNs + kRowsSmNsPerRow * rows;
  const double issue_ns =
      slots * static_cast<double>(tiles) * wide(call) * slot_ns / device.num_sms;
  double raw_ns = 0.0;
  if (call.chunk_key != nullptr) {
    raw_ns = static_cast<double>(call.num_seqs * call.cache.num_kv_heads * tiles * q_len) * rows *
             format.head_dim * 4 / (kRowsRawFlopsPerSmNs * device.num_sms);
  }
  return kRowsFixedUs + 1e-3 * (std::max(bytes_ns, issue_ns) + raw_ns);
}

double tile_cost_us(TileEngine engine, const AttentionCall& call, int64_t seq_len,
                    const DeviceInfo& device) {
  const double flops_per_sm_ns =
      engine == TileEngine::kHopper ? kHopperFlopsPerSmNs : kTileFlopsPerSmNs;
  const int head_dim = call.cache.format.head_dim;
  const int64_t contexts = int64_t{call.num_seqs} * call.cache.num_kv_heads;
  const int rows = tile_shape(engine, head_dim).rows;
  const int64_t row_blocks = (largest_packed_rows(call) + rows - 1) / rows;
  const double slots = token_heads(call, seq_len);
  const double fill_ns = slots * wide(call) * kTileFillSmNs / device.num_sms;
  const double attention_ns = slots * 4.0 * head_dim * rows * static_cast<double>(row_blocks) /
                              (flops_per_sm_ns * device.num_sms);
  const double groups = static_cast<double>(contexts * row_blocks) / device.num_sms;
  return kTileFixedUs + kTileGroupUs * groups + 1e-3 * (fill_ns + attention_ns);
}

TileEngine cheaper_tile(const DeviceInfo& device) {
  return device.arch == 90 ? TileEngine::kHopper : TileEngine::kPortable;
}

bool rows_are_cheaper(const AttentionCall& call, const DeviceInfo& device) {
  const TileEngine tile = cheaper_tile(device);
  const auto cheaper_at = [&](int64_t q_len) {
    AttentionCall at = call;
    at.max_q_len = q_len;
    return rows_cost_us(at, kChoiceTokens, device) <= tile_cost_us(tile, at, kChoiceTokens, device);
  };
  // Where the tile engine begins another row block its cost jumps, and could hand back what it had
  // already won. The rows engine's cost only grows, so the end of each block before tells.
  const int64_t q_len = largest_q_len(call);
  const int rows = tile_shape(tile, call.cache.format.head_dim).rows, group = group_of(call);
  for (int64_t end = rows; end / group < q_len; end += rows) {
    if (end >= group && !cheaper_at(end / group)) return false;
  }
  return cheaper_at(q_len);
}

}  // namespace kvtile::cuda
