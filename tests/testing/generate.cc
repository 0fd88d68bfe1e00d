// Building hostile attention batches.
#include "tests/testing/generate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "kvtile/codec.h"

namespace kvtile::testing {
namespace {

constexpr int kSparePages = 3;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A random byte as an e4m3 byte of magnitude up to 3.75; e4b15 ends at 1.875 by itself.
int small_e4m3(int byte) { return (byte & 0x80) | ((byte & 0x7f) * 0x48 >> 7); }

// random_slot() straight into memory: uniform codes are random bytes, whatever their width.
void fill_slot(const SlotFormat& format, Random* random, std::byte* slot) {
  const auto fill = [&](int offset, int bytes) {
    for (int i = 0; i < bytes; i += 8) {
      const uint64_t word = random->bits();
      std::memcpy(slot + offset + i, &word, static_cast<size_t>(std::min(8, bytes - i)));
    }
  };
  const auto write_word = [&](int offset, double x) {
    const uint16_t word = double_to_half(x);
    std::memcpy(slot + offset, &word, sizeof(word));
  };
  fill(0, format.key_bytes());
  if (format.key == KeyCode::kFp8E4M3) {
    for (int d = 0; d < format.head_dim; ++d) {
      slot[d] = static_cast<std::byte>(small_e4m3(std::to_integer<int>(slot[d])));
    }
  }
  if (format.rotated()) {
    write_word(format.norm_offset(), std::sqrt(format.head_dim) * random->uniform(0.25, 1.75));
  }
  fill(format.value_offset(), format.value_bytes());
  write_word(format.scale_offset(), random->uniform(0.005, 0.3));
  write_word(format.zero_offset(), random->uniform(-2.5, 0.5));
}

}  // namespace

SlotFormat make_format(const std::string& preset, int head_dim, KeyCode fp8) {
  SlotFormat format;
  const Status status = parse_preset(preset, head_dim, &format, fp8);
  if (!status.ok()) throw std::invalid_argument(status.message());
  return format;
}

void pack_codes(const std::vector<int>& codes, int bits, std::byte* bytes) {
  std::fill(bytes, bytes + ceil_div(static_cast<int64_t>(codes.size()) * bits, 8), std::byte{0});
  for (size_t i = 0; i < codes.size(); ++i) {
    for (int b = 0; b < bits; ++b) {
      const size_t bit = i * static_cast<size_t>(bits) + static_cast<size_t>(b);
      if ((codes[i] >> b) & 1) bytes[bit / 8] |= std::byte{1} << (bit % 8);
    }
  }
}

int unpack_code(const std::byte* bytes, int index, int bits) {
  int code = 0;
  for (int b = 0; b < bits; ++b) {
    const int bit = index * bits + b;
    code |= std::to_integer<int>((bytes[bit / 8] >> (bit % 8)) & std::byte{1}) << b;
  }
  return code;
}

void write_slot(const SlotFormat& format, const SlotContent& content, std::byte* slot) {
  const auto write_word = [slot](int offset, uint16_t word) {
    slot[offset] = static_cast<std::byte>(word & 0xff);
    slot[offset + 1] = static_cast<std::byte>(word >> 8);
  };
  pack_codes(content.key_codes, key_bits(format.key), slot);
  if (format.rotated()) write_word(format.norm_offset(), content.norm);
  pack_codes(content.value_codes, value_bits(format.value), slot + format.value_offset());
  write_word(format.scale_offset(), content.scale);
  write_word(format.zero_offset(), content.zero);
}

SlotContent random_slot(const SlotFormat& format, Random* random) {
  SlotContent content;
  for (int d = 0; d < format.head_dim; ++d) {
    int code = static_cast<int>(random->bits() & ((1u << key_bits(format.key)) - 1));
    if (format.key == KeyCode::kFp8E4M3) code = small_e4m3(code);
    content.key_codes.push_back(code);
    content.value_codes.push_back(
        static_cast<int>(random->bits() & ((1u << value_bits(format.value)) - 1)));
  }
  content.norm = double_to_half(std::sqrt(format.head_dim) * random->uniform(0.25, 1.75));
  content.scale = double_to_half(random->uniform(0.005, 0.3));
  content.zero = double_to_half(random->uniform(-2.5, 0.5));
  return content;
}

std::string describe(const AttendSpec& spec) {
  std::ostringstream text;
  text << format_name(spec.format()) << " d" << spec.head_dim << " kv" << spec.num_kv_heads
       << " group" << spec.group << " block" << spec.block_size << " layout"
       << static_cast<int>(spec.layout) << " pad" << spec.slot_padding << " "
       << dtype_name(spec.dtype) << (spec.mask.causal ? " causal" : " full") << " window"
       << spec.mask.window << " softcap" << spec.softcap << (spec.sinks ? " sinks" : "")
       << (spec.raw_chunk ? " raw" : " packed") << (spec.short_tables ? " short-tables" : "")
       << (spec.strided ? " strided" : "") << " tile" << spec.tile_tokens << " seed" << spec.seed
       << " seqs";
  for (size_t i = 0; i < std::min<size_t>(spec.seqs.size(), 12); ++i) {
    text << " " << spec.seqs[i].cached_len << "+" << spec.seqs[i].q_len;
  }
  return text.str();
}

AttendProblem::AttendProblem(const AttendSpec& spec_in) : spec(spec_in) {
  Random random(spec.seed);
  build_tensors(&random);
  build_cache(&random);
  fill_slots(&random);
}

int64_t AttendProblem::packed_begin(int seq) const {
  const int64_t first_row = std::max<int64_t>(0, cached_len(seq));
  const int64_t begin =
      spec.mask.window > 0 ? std::max<int64_t>(0, first_row - spec.mask.window + 1) : 0;
  return std::min(begin, packed_end(seq));
}

int64_t AttendProblem::packed_end(int seq) const {
  if (q_len(seq) == 0) return 0;
  return std::max<int64_t>(0, spec.raw_chunk ? cached_len(seq) : seq_len(seq));
}

void AttendProblem::build_tensors(Random* random) {
  const int64_t heads = spec.num_heads(), kv_heads = spec.num_kv_heads, dim = spec.head_dim;
  const int64_t bytes = dtype_bytes(spec.dtype);
  std::vector<int32_t> cu = {0}, lens;
  for (int s = 0; s < num_seqs(); ++s) {
    cu.push_back(cu.back() + static_cast<int32_t>(q_len(s)));
    lens.push_back(static_cast<int32_t>(seq_len(s)));
  }
  const int64_t total_q = cu.back();

  const auto strides = [&](int64_t num, int64_t head_pad, int64_t token_pad) {
    if (!spec.strided) return Strides{num * dim, dim};
    return Strides{num * (dim + head_pad) + token_pad, dim + head_pad};
  };
  query_strides_ = strides(heads, 3, 5);
  out_strides_ = strides(heads, 1, 7);
  key_strides_ = strides(kv_heads, 2, 11);
  value_strides_ = strides(kv_heads, 9, 4);
  lse_strides_ = spec.strided ? Strides{heads + 2, 1} : Strides{1, total_q};

  const auto tensor_bytes = [&](const Strides& s, int64_t num) {
    if (total_q == 0) return size_t{0};
    return static_cast<size_t>(((total_q - 1) * s.token + (num - 1) * s.head + dim) * bytes);
  };
  const auto fill = [&](GuardedBuffer* buffer, const Strides& s, int64_t num) {
    *buffer = GuardedBuffer(tensor_bytes(s, num));
    for (int64_t t = 0; t < total_q; ++t) {
      for (int64_t h = 0; h < num; ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          store_element(buffer->data(), spec.dtype, t * s.token + h * s.head + d, random->normal());
        }
      }
    }
  };
  const auto copy = [](GuardedBuffer* buffer, const auto& values) {
    *buffer = GuardedBuffer(values.size() * sizeof(values[0]));
    if (!values.empty()) std::memcpy(buffer->data(), values.data(), buffer->size());
  };

  fill(&query_, query_strides_, heads);
  if (spec.raw_chunk) {
    fill(&chunk_key_, key_strides_, kv_heads);
    fill(&chunk_value_, value_strides_, kv_heads);
  }
  copy(&cu_seqlens_q_, cu);
  copy(&seq_lens_, lens);
  if (spec.sinks) {
    std::vector<float> logits;
    for (int64_t h = 0; h < heads; ++h) {
      logits.push_back(static_cast<float>(random->uniform(-1.0, 3.0)));
    }
    copy(&sinks_, logits);
  }
  out_ = SentinelBuffer(tensor_bytes(out_strides_, heads));
  const int64_t lse_count =
      total_q == 0 ? 0 : (total_q - 1) * lse_strides_.token + (heads - 1) * lse_strides_.head + 1;
  lse_ = SentinelBuffer(static_cast<size_t>(lse_count) * sizeof(float));

  call.query = query_.data();
  call.out = out_.data();
  call.lse = reinterpret_cast<float*>(lse_.data());
  call.dtype = spec.dtype;
  call.num_seqs = num_seqs();
  call.total_q = total_q;
  call.num_heads = static_cast<int>(heads);
  call.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  call.softcap = spec.softcap;
  call.sinks = spec.sinks ? sinks_.as<float>() : nullptr;
  call.mask = spec.mask;
  call.cu_seqlens_q = cu_seqlens_q_.as<int32_t>();
  call.seq_lens = seq_lens_.as<int32_t>();
  if (spec.raw_chunk) {
    call.chunk_key = chunk_key_.data();
    call.chunk_value = chunk_value_.data();
  }
  call.tile_tokens = spec.tile_tokens;
  if (spec.strided) {
    call.query_stride_token = query_strides_.token;
    call.query_stride_head = query_strides_.head;
    call.out_stride_token = out_strides_.token;
    call.out_stride_head = out_strides_.head;
    call.chunk_key_stride_token = key_strides_.token;
    call.chunk_key_stride_head = key_strides_.head;
    call.chunk_value_stride_token = value_strides_.token;
    call.chunk_value_stride_head = value_strides_.head;
    call.lse_stride_token = lse_strides_.token;
    call.lse_stride_head = lse_strides_.head;
  }
}

void AttendProblem::build_cache(Random* random) {
  const int64_t bs = spec.block_size;
  int64_t used = 0, max_blocks = 1;
  for (int s = 0; s < num_seqs(); ++s) {
    if (packed_end(s) > packed_begin(s)) used += ceil_div(packed_end(s), bs) - packed_begin(s) / bs;
    const int64_t first = spec.short_tables ? packed_begin(s) / bs : 0;
    max_blocks = std::max(max_blocks, ceil_div(std::max<int64_t>(seq_len(s), 1), bs) - first);
  }
  const int64_t num_blocks = used + kSparePages;

  const SlotFormat format = spec.format();
  const int slot_stride = format.slot_bytes() + spec.slot_padding;
  PagedCache& cache = call.cache;
  cache = make_cache(nullptr, num_blocks, spec.block_size, spec.num_kv_heads, format, spec.layout,
                     slot_stride);
  if (spec.layout == PageLayout::kStrided) {
    cache.stride_token = slot_stride;
    cache.stride_block = slot_stride * bs + 14;
    cache.stride_head = cache.stride_block * num_blocks + 22;
  }
  cache.pages_bytes = cache_extent_bytes(cache);
  pages_ = GuardedBuffer(static_cast<size_t>(cache.pages_bytes));
  std::fill(pages_.data(), pages_.data() + pages_.size(), spec.poison);
  cache.pages = pages_.data();

  std::vector<int32_t> order(static_cast<size_t>(num_blocks));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<size_t>(random->integer(0, static_cast<int64_t>(i) - 1))]);
  }
  constexpr int32_t kGarbage[] = {0x7FFFFFFF, -1, static_cast<int32_t>(0x80000000)};
  const int64_t table_stride = spec.strided ? max_blocks + 3 : max_blocks;
  std::vector<int32_t> table(
      static_cast<size_t>(num_seqs() == 0 ? 0 : (num_seqs() - 1) * table_stride + max_blocks));
  for (size_t i = 0; i < table.size(); ++i) table[i] = kGarbage[i % 3];
  std::vector<int32_t> firsts;
  size_t next = 0;
  for (int s = 0; s < num_seqs(); ++s) {
    const int64_t first = spec.short_tables ? packed_begin(s) / bs : 0;
    firsts.push_back(static_cast<int32_t>(first * bs));
    auto& blocks = block_of_.emplace_back(static_cast<size_t>(ceil_div(packed_end(s), bs)), -1);
    if (packed_begin(s) == packed_end(s)) continue;
    for (int64_t b = packed_begin(s) / bs; b < ceil_div(packed_end(s), bs); ++b) {
      blocks[static_cast<size_t>(b)] = order[next++];
      table[static_cast<size_t>(s * table_stride + b - first)] = blocks[static_cast<size_t>(b)];
    }
  }
  block_table_ = GuardedBuffer(table.size() * sizeof(int32_t));
  if (!table.empty()) std::memcpy(block_table_.data(), table.data(), block_table_.size());
  call.block_table = block_table_.as<int32_t>();
  call.max_blocks = max_blocks;
  call.block_table_stride = spec.strided ? table_stride : 0;
  if (spec.short_tables) {
    first_positions_ = GuardedBuffer(firsts.size() * sizeof(int32_t));
    if (!firsts.empty()) {
      std::memcpy(first_positions_.data(), firsts.data(), first_positions_.size());
    }
    call.first_positions = first_positions_.as<int32_t>();
  }
}

void AttendProblem::fill_slots(Random* random) {
  for (int s = 0; s < num_seqs(); ++s) {
    for (int64_t p = packed_begin(s); p < packed_end(s); ++p) {
      for (int h = 0; h < spec.num_kv_heads; ++h) {
        fill_slot(call.cache.format, random, slot(s, p, h));
      }
    }
  }
}

int64_t AttendProblem::slot_index(int seq, int64_t position) const {
  const int32_t block =
      block_of_[static_cast<size_t>(seq)][static_cast<size_t>(position / spec.block_size)];
  return int64_t{block} * spec.block_size + position % spec.block_size;
}

std::byte* AttendProblem::slot(int seq, int64_t position, int head) {
  const int64_t index = slot_index(seq, position);
  return pages_.data() +
         call.cache.slot_offset(index / spec.block_size, index % spec.block_size, head);
}

void AttendProblem::set_chunk_key(int64_t row, int kv_head, int d, double x) {
  store_element(chunk_key_.data(), spec.dtype,
                row * key_strides_.token + kv_head * key_strides_.head + d, x);
}

void AttendProblem::set_chunk_value(int64_t row, int kv_head, int d, double x) {
  store_element(chunk_value_.data(), spec.dtype,
                row * value_strides_.token + kv_head * value_strides_.head + d, x);
}

void AttendProblem::set_query(int64_t row, int head, int d, double x) {
  store_element(query_.data(), spec.dtype,
                row * query_strides_.token + head * query_strides_.head + d, x);
}

Status AttendProblem::encode(DType dtype, int64_t num_tokens, const void* key, const void* value,
                             const int64_t* slots) {
  EncodeCall encode_call;
  encode_call.key = key;
  encode_call.value = value;
  encode_call.dtype = dtype;
  encode_call.num_tokens = num_tokens;
  encode_call.slot_mapping = slots;
  encode_call.cache = call.cache;
  return encode_slots(encode_call);
}

Status AttendProblem::run(const RunOptions& options, RunReport* report) {
  size_t bytes = 0;
  const Status status = workspace_bytes(call, options, &bytes);
  if (!status.ok()) return status;
  workspace_ = SentinelBuffer(bytes);
  GuardedBuffer* inputs[] = {&pages_,       &query_,           &chunk_key_,
                             &chunk_value_, &block_table_,     &cu_seqlens_q_,
                             &seq_lens_,    &first_positions_, &sinks_};
  for (GuardedBuffer* input : inputs) input->protect(true);
  Status result = attend(call, Workspace{workspace_.data(), bytes}, options, report);
  for (GuardedBuffer* input : inputs) input->protect(false);
  return result;
}

int64_t AttendProblem::out_index(int64_t row, int head) const {
  return row * out_strides_.token + head * out_strides_.head;
}

int64_t AttendProblem::lse_index(int64_t row, int head) const {
  return row * lse_strides_.token + head * lse_strides_.head;
}

double AttendProblem::out(int64_t row, int head, int d) const {
  return load_element(out_.data(), spec.dtype, out_index(row, head) + d);
}

double AttendProblem::lse(int64_t row, int head) const {
  return load_element(lse_.data(), DType::kFloat32, lse_index(row, head));
}

std::vector<std::byte> AttendProblem::row_bits(int64_t row) const {
  std::vector<std::byte> bits;
  const int64_t bytes = dtype_bytes(spec.dtype);
  for (int h = 0; h < spec.num_heads(); ++h) {
    const std::byte* o = out_.data() + out_index(row, h) * bytes;
    bits.insert(bits.end(), o, o + spec.head_dim * bytes);
    const std::byte* l = lse_.data() + lse_index(row, h) * 4;
    bits.insert(bits.end(), l, l + 4);
  }
  return bits;
}

std::vector<std::byte> AttendProblem::all_bits() const {
  std::vector<std::byte> bits;
  for (int64_t r = 0; r < call.total_q; ++r) {
    const std::vector<std::byte> row = row_bits(r);
    bits.insert(bits.end(), row.begin(), row.end());
  }
  return bits;
}

bool AttendProblem::outputs_contained() const {
  if (!out_.margins_intact() || !lse_.margins_intact() || !workspace_.margins_intact()) {
    return false;
  }
  if (!spec.strided) return true;
  const auto bytes = static_cast<size_t>(dtype_bytes(spec.dtype));
  size_t cursor = 0;
  for (int64_t r = 0; r < call.total_q; ++r) {
    for (int h = 0; h < spec.num_heads(); ++h) {
      const size_t first = static_cast<size_t>(out_index(r, h)) * bytes;
      if (!out_.untouched(cursor, first)) return false;
      cursor = first + static_cast<size_t>(spec.head_dim) * bytes;
    }
    const auto lse_end = static_cast<size_t>(lse_index(r, spec.num_heads() - 1) + 1) * 4;
    const auto next = std::min(lse_.size(), static_cast<size_t>(lse_index(r + 1, 0)) * 4);
    if (!lse_.untouched(lse_end, std::max(next, lse_end))) return false;
  }
  return true;
}

std::vector<AttendProblem::Region> AttendProblem::input_regions() {
  std::vector<Region> regions;
  for (GuardedBuffer* input : {&pages_, &query_, &chunk_key_, &chunk_value_, &block_table_,
                               &cu_seqlens_q_, &seq_lens_, &first_positions_, &sinks_}) {
    if (input->size() > 0) regions.push_back({input->data(), input->size()});
  }
  return regions;
}

std::vector<AttendProblem::Region> AttendProblem::output_regions() {
  return {{out_.data(), out_.size()}, {lse_.data(), lse_.size()}};
}

void AttendProblem::refill_outputs() {
  out_.refill();
  lse_.refill();
}

}  // namespace kvtile::testing
