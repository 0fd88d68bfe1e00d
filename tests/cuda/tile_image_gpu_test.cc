// The tile image against the CPU decoder: every element where image.h says it is, zeros outside the
// visible range, NaN for visible tokens without a page, and nothing written elsewhere.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kvtile/codec.h"
#include "src/attention/cuda/tile_image.h"
#include "src/core/float16.h"
#include "tests/cuda/device_buffer.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile::cuda {
namespace {

using kvtile::testing::DeviceBuffer;
using kvtile::testing::is_ok;
using kvtile::testing::make_format;
using kvtile::testing::Random;

struct ImageCase {
  int64_t seq_len[2] = {0, 0};
  int q_len = 1;
  int block_size = 16;
  int subtile = 64;
  int64_t token_begin = 0;
  int num_tokens = 256;
  int64_t window = 0;
  bool raw_chunk = false;
  bool hostile = false;
};

void check_image(const SlotFormat& format, const ImageCase& c) {
  constexpr int kHeads = 3, kSeqs = 2;
  Random random(7);
  const int64_t max_blocks = 40;
  PagedCache cache = make_cache(nullptr, kSeqs * max_blocks, c.block_size, kHeads, format);
  std::vector<std::byte> pages(static_cast<size_t>(cache.pages_bytes));
  for (auto& byte : pages) byte = static_cast<std::byte>(random.bits());
  std::vector<int32_t> table(static_cast<size_t>(kSeqs * max_blocks));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
  if (c.hostile) {
    table[1] = -1;
    table[static_cast<size_t>(max_blocks) + 2] = 1 << 30;
  }
  const std::vector<int32_t> cu_seqlens = {0, c.q_len, 2 * c.q_len};
  const std::vector<int32_t> seq_lens = {static_cast<int32_t>(c.seq_len[0]),
                                         static_cast<int32_t>(c.seq_len[1])};
  DeviceBuffer device_pages(pages), device_table(table), device_cu(cu_seqlens),
      device_lens(seq_lens);

  AttentionCall call;
  call.cache = cache;
  call.cache.pages = device_pages.as<>();
  call.num_heads = kHeads;
  call.num_seqs = kSeqs;
  call.total_q = 2 * c.q_len;
  call.block_table = device_table.as<int32_t>();
  call.max_blocks = max_blocks;
  call.cu_seqlens_q = device_cu.as<int32_t>();
  call.seq_lens = device_lens.as<int32_t>();
  call.mask.window = c.window;
  if (c.raw_chunk) call.chunk_key = call.chunk_value = device_pages.as<>();

  const int64_t head_bytes = image_bytes(c.num_tokens, c.subtile, format.head_dim);
  DeviceBuffer image(static_cast<size_t>(2 * 2 * head_bytes));
  TileImageParams tile;
  tile.image = image.as<>();
  tile.stride_head = head_bytes;
  tile.stride_seq = 2 * head_bytes;
  tile.num_seqs = kSeqs;
  tile.head_begin = 1;
  tile.num_kv_heads = 2;
  tile.token_begin = c.token_begin;
  tile.num_tokens = c.num_tokens;
  tile.subtile_tokens = c.subtile;
  ASSERT_TRUE(is_ok(launch_tile_image(format, make_attention_params(call), tile, nullptr)));
  const std::vector<std::byte> got = image.download();
  EXPECT_TRUE(image.margins_intact());

  cache.pages = pages.data();
  std::vector<uint16_t> key(static_cast<size_t>(kHeads * format.head_dim)), value(key);
  for (int seq = 0; seq < kSeqs; ++seq) {
    const int64_t seq_len = c.seq_len[seq];
    const int64_t cached = std::max<int64_t>(0, seq_len - c.q_len);
    const int64_t end = c.raw_chunk ? cached : seq_len;
    const int64_t begin = c.window > 0 ? std::max<int64_t>(0, seq_len - c.q_len - c.window + 1) : 0;
    const int padded = (c.num_tokens + c.subtile - 1) / c.subtile * c.subtile;
    for (int t = 0; t < padded; ++t) {
      const int64_t position = c.token_begin + t;
      const int64_t sub_begin = c.token_begin + t / c.subtile * c.subtile;
      const bool written =
          sub_begin < std::min(end, c.token_begin + c.num_tokens) && sub_begin + c.subtile > begin;
      const bool visible = position >= begin && position < end && t < c.num_tokens;
      bool lost = false;
      if (visible) {
        const int32_t block =
            table[static_cast<size_t>(seq * max_blocks + position / c.block_size)];
        lost = block < 0 || block >= cache.num_blocks;
        if (!lost) {
          const int64_t slot = int64_t{block} * c.block_size + position % c.block_size;
          DecodeCall decode;
          decode.cache = cache;
          decode.slot_mapping = &slot;
          decode.num_tokens = 1;
          decode.key = key.data();
          decode.value = value.data();
          decode.dtype = DType::kFloat16;
          ASSERT_TRUE(is_ok(decode_slots(decode)));
        }
      }
      for (int head = 0; head < 2; ++head) {
        for (int d = 0; d < format.head_dim; ++d) {
          for (int plane = 0; plane < 2; ++plane) {
            const int64_t at = seq * tile.stride_seq + head * head_bytes +
                               t / c.subtile * subtile_bytes(c.subtile, format.head_dim) +
                               plane * plane_bytes(c.subtile, format.head_dim) +
                               chunk_offset(d / kChunkDims, t % c.subtile, c.subtile) +
                               d % kChunkDims * 2;
            uint16_t word;
            std::memcpy(&word, &got[static_cast<size_t>(at)], 2);
            const auto element = static_cast<size_t>((head + 1) * format.head_dim + d);
            uint16_t expected = 0;
            if (!written) {
              expected = 0xA5A5;
            } else if (lost) {
              ASSERT_TRUE(std::isnan(half_to_float(word))) << seq << " " << t << " " << d;
              continue;
            } else if (visible) {
              expected = (plane == 0 ? key : value)[element];
            }
            if (std::isnan(half_to_float(expected)) && std::isnan(half_to_float(word))) continue;
            ASSERT_EQ(word, expected) << "seq " << seq << " token " << t << " head " << head
                                      << " d " << d << " plane " << plane;
          }
        }
      }
    }
  }
}

TEST(TileImage, EveryFormatAndHeadDim) {
  for (const auto& name : kvtile::testing::format_names()) {
    for (int head_dim : {64, 128, 256}) {
      SCOPED_TRACE(kvtile::testing::format_label(name, head_dim));
      check_image(make_format(name.preset, head_dim, name.fp8), {{300, 70}, 3});
    }
  }
}

TEST(TileImage, RangesWindowsAndHostileTables) {
  const SlotFormat format = make_format("4bit_nc", 128);
  check_image(format, {{300, 256}, 3, 16, 64, 256, 128});               // second tile, one seq ends
  check_image(format, {{300, 257}, 3, 16, 128, 0, 256});                // wider sub-tiles
  check_image(format, {{300, 200}, 5, 16, 64, 0, 256, 0, true});        // raw chunk: cached end
  check_image(format, {{300, 130}, 2, 16, 64, 0, 256, 100});            // window
  check_image(format, {{40, 3}, 5, 1, 64, 0, 64});                      // block_size 1, early rows
  check_image(format, {{639, 640}, 1, 16, 192, 192, 300});              // tile no multiple of N
  check_image(format, {{300, 70}, 3, 16, 64, 0, 256, 0, false, true});  // entries naming no page
  check_image(format, {{300, 70}, 3, 7, 64, 0, 192});                   // odd block_size
}

TEST(TileImage, RefusesAHeadDimWithoutAKernel) {
  TileImageParams tile;
  tile.num_tokens = 64;
  EXPECT_TRUE(
      kvtile::testing::fails_with(launch_tile_image(make_format("4bit_nc", 32), {}, tile, nullptr),
                                  StatusCode::kUnsupported, "head_dim"));
}

}  // namespace
}  // namespace kvtile::cuda
