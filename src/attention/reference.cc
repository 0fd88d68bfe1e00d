// The oracle in float64. Inputs: the call's host memory and nothing the row does not see; output:
// one row, one head. It unpacks bits one by one, takes exponentials in two passes and keeps every
// intermediate in double, so that its own error is far below anything it judges. The codebook
// levels are frozen data and are the only thing shared with the codec.
#include "src/attention/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "src/codec/codebook.h"

namespace kvtile {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A binary floating-point word of 1 + exponent_bits + mantissa_bits bits, IEEE style.
double decode_ieee(uint32_t word, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(word >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double mantissa = static_cast<double>(word & ((1u << mantissa_bits) - 1));
  const double sign = (word >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa == 0 ? sign * kInfinity : kNaN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign *
         std::ldexp(std::ldexp(1.0, mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

// FP8 with 1-4-3 bits: e4m3 has bias 7 and gives up its last code to NaN, e4b15 has bias 15 and is
// finite throughout.
double decode_fp8(uint32_t byte, KeyCode flavour) {
  const bool e4m3 = flavour == KeyCode::kFp8E4M3;
  if (e4m3 && (byte & 0x7f) == 0x7f) return kNaN;
  const int bias = e4m3 ? 7 : 15;
  const int exponent = static_cast<int>(byte >> 3) & 15;
  const int mantissa = static_cast<int>(byte & 7);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - 3)
                                         : std::ldexp(8 + mantissa, exponent - bias - 3);
  return byte & 0x80 ? -magnitude : magnitude;
}

uint32_t read_byte(const std::byte* p, int offset) { return std::to_integer<uint32_t>(p[offset]); }

double read_half(const std::byte* slot, int offset) {
  return decode_ieee(read_byte(slot, offset) | read_byte(slot, offset + 1) << 8, 5, 10);
}

// Code `index` of a little-endian bit string of `bits`-bit codes.
int read_code(const std::byte* codes, int index, int bits) {
  int code = 0;
  for (int b = 0; b < bits; ++b) {
    const int bit = index * bits + b;
    code |= static_cast<int>((read_byte(codes, bit / 8) >> (bit % 8)) & 1) << b;
  }
  return code;
}

double load(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, static_cast<const std::byte*>(data) + 4 * index, sizeof(x));
    return static_cast<double>(x);
  }
  uint16_t word;
  std::memcpy(&word, static_cast<const std::byte*>(data) + 2 * index, sizeof(word));
  return dtype == DType::kFloat16 ? decode_ieee(word, 5, 10) : decode_ieee(word, 8, 7);
}

std::vector<double> load_row(const void* data, DType dtype, int64_t first, int head_dim) {
  std::vector<double> row(static_cast<size_t>(head_dim));
  for (int d = 0; d < head_dim; ++d) row[static_cast<size_t>(d)] = load(data, dtype, first + d);
  return row;
}

// Offset of (token, head) in a [tokens, heads, head_dim] tensor whose zero strides mean contiguous.
int64_t row_offset(int64_t token, int64_t head, int64_t stride_token, int64_t stride_head,
                   int64_t num_heads, int64_t head_dim) {
  if (stride_head == 0) stride_head = head_dim;
  if (stride_token == 0) stride_token = num_heads * head_dim;
  return (token == 0 ? 0 : token * stride_token) + (head == 0 ? 0 : head * stride_head);
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The sequence a row belongs to and where its keys lie.
struct RowView {
  const AttentionCall& call;
  int64_t seq, first_row, cached_len;
  int kv_head;

  bool raw(int64_t position) const { return call.chunk_key != nullptr && position >= cached_len; }

  const std::byte* slot(int64_t position) const {
    const PagedCache& cache = call.cache;
    const int64_t first = call.first_positions != nullptr ? call.first_positions[seq] : 0;
    const int64_t stride = call.block_table_stride != 0 ? call.block_table_stride : call.max_blocks;
    const int64_t page = call.block_table[seq * stride + (position - first) / cache.block_size];
    return cache.pages + cache.slot_offset(page, position % cache.block_size, kv_head);
  }

  void read_raw(int64_t position, bool want_key, std::vector<double>* x) const {
    const int64_t token = first_row + position - cached_len;
    const int64_t stride_token =
        want_key ? call.chunk_key_stride_token : call.chunk_value_stride_token;
    const int64_t stride_head =
        want_key ? call.chunk_key_stride_head : call.chunk_value_stride_head;
    const int head_dim = call.cache.format.head_dim;
    *x = load_row(
        want_key ? call.chunk_key : call.chunk_value, call.dtype,
        row_offset(token, kv_head, stride_token, stride_head, call.cache.num_kv_heads, head_dim),
        head_dim);
  }

  void read_key(int64_t position, std::vector<double>* key) const {
    if (raw(position)) return read_raw(position, true, key);
    reference_decode_slot(call.cache.format, slot(position), key->data(), nullptr);
  }

  void read_value(int64_t position, std::vector<double>* value) const {
    if (raw(position)) return read_raw(position, false, value);
    reference_decode_slot(call.cache.format, slot(position), nullptr, value->data());
  }
};

}  // namespace

void reference_decode_slot(const SlotFormat& format, const std::byte* slot, double* key,
                           double* value) {
  const int head_dim = format.head_dim;
  if (key != nullptr && !format.rotated()) {
    for (int d = 0; d < head_dim; ++d) key[d] = decode_fp8(read_byte(slot, d), format.key);
  }
  if (key != nullptr && format.rotated()) {
    const Codebook book = make_codebook(format.key, head_dim);
    double squares = 0;
    for (int d = 0; d < head_dim; ++d) {
      key[d] = static_cast<double>(book.levels[read_code(slot, d, key_bits(format.key))]);
      squares += key[d] * key[d];
    }
    const double norm = read_half(slot, format.norm_offset());
    const double scale = format.norm_correction ? norm / std::sqrt(squares) : norm;
    for (int d = 0; d < head_dim; ++d) key[d] *= scale;
  }
  if (value != nullptr) {
    const double scale = read_half(slot, format.scale_offset());
    const double zero = read_half(slot, format.zero_offset());
    for (int d = 0; d < head_dim; ++d) {
      value[d] =
          read_code(slot + format.value_offset(), d, value_bits(format.value)) * scale + zero;
    }
  }
}

void reference_hadamard(double* x, int n) {
  for (int half = 1; half < n; half *= 2) {
    for (int i = 0; i < n; ++i) {
      if (i & half) continue;
      const double a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  for (int i = 0; i < n; ++i) x[i] /= std::sqrt(static_cast<double>(n));
}

void reference_attend_row(const AttentionCall& call, int64_t row, int head, double* out,
                          double* lse) {
  const PagedCache& cache = call.cache;
  const int head_dim = cache.format.head_dim;
  const int kv_head = head / (call.num_heads / cache.num_kv_heads);

  int seq = 0;
  while (call.cu_seqlens_q[seq + 1] <= row) ++seq;
  const int64_t first_row = call.cu_seqlens_q[seq];
  const int64_t q_len = call.cu_seqlens_q[seq + 1] - first_row;
  const int64_t seq_len = call.seq_lens[seq];
  const int64_t cached_len = seq_len - q_len;
  const int64_t position = cached_len + row - first_row;
  const int64_t end = call.mask.causal ? position + 1 : seq_len;
  const int64_t begin =
      call.mask.window > 0 ? std::max<int64_t>(0, position - call.mask.window + 1) : 0;

  std::fill(out, out + head_dim, 0.0);
  *lse = -kInfinity;
  if (position < 0 || begin >= end) return;

  const std::vector<double> query =
      load_row(call.query, call.dtype,
               row_offset(row, head, call.query_stride_token, call.query_stride_head,
                          call.num_heads, head_dim),
               head_dim);
  std::vector<double> stored_query = query;
  if (cache.format.rotated()) reference_hadamard(stored_query.data(), head_dim);

  const RowView view{call, seq, first_row, cached_len, kv_head};
  std::vector<double> scores;
  std::vector<double> key(static_cast<size_t>(head_dim)), value(static_cast<size_t>(head_dim));
  bool poisoned = false;
  for (int64_t p = begin; p < end; ++p) {
    view.read_key(p, &key);
    const bool rotated = cache.format.rotated() && !view.raw(p);
    // Elements of a non-finite norm may cancel to any score: the row is lost all the same.
    if (rotated && !std::isfinite(key[0])) poisoned = true;
    double score =
        static_cast<double>(call.softmax_scale) * dot(rotated ? stored_query : query, key);
    if (call.softcap > 0) {
      const double cap = static_cast<double>(call.softcap);
      score = cap * std::tanh(score / cap);
    }
    if (std::isnan(score) || score == kInfinity) poisoned = true;
    scores.push_back(score);
  }
  if (poisoned) {
    std::fill(out, out + head_dim, kNaN);
    *lse = kNaN;
    return;
  }

  double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  if (call.sinks != nullptr) {
    const double sink = static_cast<double>(call.sinks[head]);
    largest = std::max(largest, sink);
    if (largest > -kInfinity) sum = std::exp(sink - largest);
  }
  if (largest == -kInfinity) return;
  for (int64_t p = begin; p < end; ++p) {
    const double weight = std::exp(scores[static_cast<size_t>(p - begin)] - largest);
    sum += weight;
    view.read_value(p, &value);
    for (int d = 0; d < head_dim; ++d) out[d] += weight * value[static_cast<size_t>(d)];
  }
  for (int d = 0; d < head_dim; ++d) out[d] /= sum;
  *lse = largest + std::log(sum);
}

}  // namespace kvtile
