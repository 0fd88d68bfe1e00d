// AttendProblem: one attention batch built from a spec, with everything around it hostile. Inputs
// end at unmapped pages, pages are shuffled, and whatever no visible position names (spare pages,
// unused slots, slot and page padding, hidden table entries, stride gaps) holds poison.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvtile/attention.h"
#include "kvtile/cache.h"
#include "kvtile/run.h"
#include "kvtile/slot.h"
#include "kvtile/status.h"
#include "tests/testing/buffers.h"
#include "tests/testing/numbers.h"

namespace kvtile::testing {

SlotFormat make_format(const std::string& preset, int head_dim, KeyCode fp8 = KeyCode::kFp8E4M3);

// Packs `count` codes of `bits` bits little-endian into bytes, and reads one back.
void pack_codes(const std::vector<int>& codes, int bits, std::byte* bytes);
int unpack_code(const std::byte* bytes, int index, int bits);

// Stands for a pool that is described but never read.
inline std::byte* some_pages() {
  static std::byte byte;
  return &byte;
}

// Writes a slot field by field; offsets come from the format, packing from pack_codes().
struct SlotContent {
  std::vector<int> key_codes;  // [head_dim]; FP8 bytes for FP8 keys
  std::vector<int> value_codes;
  uint16_t norm = 0, scale = 0, zero = 0;  // fp16 words
};
void write_slot(const SlotFormat& format, const SlotContent& content, std::byte* slot);

// A slot of finite, moderate content: key elements near unit size, values within about +-3.
SlotContent random_slot(const SlotFormat& format, Random* random);

struct SeqSpec {
  int64_t cached_len = 0;  // seq_len - q_len; negative gives rows before the first token
  int64_t q_len = 1;
};

struct AttendSpec {
  std::string preset = "4bit_nc";
  KeyCode fp8 = KeyCode::kFp8E4M3;
  int head_dim = 64;
  int num_kv_heads = 2;
  int group = 2;
  int block_size = 16;
  PageLayout layout = PageLayout::kTokenMajor;  // kStrided: heads outermost, padded everywhere
  int slot_padding = 0;
  DType dtype = DType::kFloat32;
  std::vector<SeqSpec> seqs = {{61, 3}};
  Mask mask;
  float softcap = 0.0f;
  bool sinks = false;
  bool raw_chunk = false;
  bool short_tables = false;  // tables start at the window, first_positions given
  bool strided = false;       // every tensor padded, key and value differently
  int64_t tile_tokens = 0;
  uint64_t seed = 1;
  std::byte poison{0xFF};

  SlotFormat format() const { return make_format(preset, head_dim, fp8); }
  int num_heads() const { return num_kv_heads * group; }
};

std::string describe(const AttendSpec& spec);

class AttendProblem {
 public:
  explicit AttendProblem(const AttendSpec& spec);

  AttendSpec spec;
  AttentionCall call;

  int64_t q_len(int seq) const { return spec.seqs[static_cast<size_t>(seq)].q_len; }
  int64_t cached_len(int seq) const { return spec.seqs[static_cast<size_t>(seq)].cached_len; }
  int64_t seq_len(int seq) const { return cached_len(seq) + q_len(seq); }
  int num_seqs() const { return static_cast<int>(spec.seqs.size()); }

  // Keys some row of the sequence reads from the packed cache: [packed_begin, packed_end).
  int64_t packed_begin(int seq) const;
  int64_t packed_end(int seq) const;

  // The slot of a position in [packed_begin, packed_end), for tests that plant something there.
  std::byte* slot(int seq, int64_t position, int head);
  // Its encode_slots/decode_slots name.
  int64_t slot_index(int seq, int64_t position) const;
  // Raw key or value of query row `row`; query of (row, head).
  void set_chunk_key(int64_t row, int kv_head, int d, double x);
  void set_chunk_value(int64_t row, int kv_head, int d, double x);
  void set_query(int64_t row, int head, int d, double x);

  // Encodes raw rows into the positions [packed_begin, packed_end) of every sequence, through
  // encode_slots in `dtype`: row(seq, position, head, d) of key and value.
  template <typename KeyFn, typename ValueFn>
  Status store(DType dtype, const KeyFn& key, const ValueFn& value);

  // attend() on exactly workspace_bytes() of guarded workspace; inputs are read-only meanwhile.
  Status run(const RunOptions& options = {}, RunReport* report = nullptr);

  double out(int64_t row, int head, int d) const;
  double lse(int64_t row, int head) const;
  // Bytes of one row's output and lse over all heads, for bit comparisons.
  std::vector<std::byte> row_bits(int64_t row) const;
  std::vector<std::byte> all_bits() const;

  // Margins and stride gaps of every output hold what they held before.
  bool outputs_contained() const;
  bool outputs_untouched() const { return out_.untouched() && lse_.untouched(); }
  void refill_outputs();

  // The memory behind the call's pointers, for copies elsewhere: what is read, and what is written
  // (output, then lse).
  struct Region {
    std::byte* data;
    size_t bytes;
  };
  std::vector<Region> input_regions();
  std::vector<Region> output_regions();

 private:
  struct Strides {
    int64_t token, head;
  };
  void build_cache(Random* random);
  void build_tensors(Random* random);
  void fill_slots(Random* random);
  Status encode(DType dtype, int64_t num_tokens, const void* key, const void* value,
                const int64_t* slots);
  int64_t out_index(int64_t row, int head) const;
  int64_t lse_index(int64_t row, int head) const;

  GuardedBuffer pages_, query_, chunk_key_, chunk_value_, block_table_, cu_seqlens_q_, seq_lens_,
      first_positions_, sinks_;
  SentinelBuffer out_, lse_, workspace_;
  std::vector<std::vector<int32_t>> block_of_;  // [seq][position / block_size], -1 if hidden
  Strides query_strides_{}, out_strides_{}, key_strides_{}, value_strides_{}, lse_strides_{};
};

template <typename KeyFn, typename ValueFn>
Status AttendProblem::store(DType dtype, const KeyFn& key, const ValueFn& value) {
  const int head_dim = spec.head_dim, heads = spec.num_kv_heads;
  std::vector<int64_t> slots;
  for (int s = 0; s < num_seqs(); ++s) {
    for (int64_t p = packed_begin(s); p < packed_end(s); ++p) slots.push_back(slot_index(s, p));
  }
  const size_t row_bytes = static_cast<size_t>(heads * head_dim * dtype_bytes(dtype));
  GuardedBuffer keys(slots.size() * row_bytes), values(slots.size() * row_bytes);
  int64_t i = 0;
  for (int s = 0; s < num_seqs(); ++s) {
    for (int64_t p = packed_begin(s); p < packed_end(s); ++p) {
      for (int h = 0; h < heads; ++h) {
        for (int d = 0; d < head_dim; ++d, ++i) {
          store_element(keys.data(), dtype, i, key(s, p, h, d));
          store_element(values.data(), dtype, i, value(s, p, h, d));
        }
      }
    }
  }
  return encode(dtype, static_cast<int64_t>(slots.size()), keys.data(), values.data(),
                slots.data());
}

}  // namespace kvtile::testing
