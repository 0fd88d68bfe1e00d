// Checks of a golden file; see verify_golden.h. Input: the file and the engine. Everything that
// judges the engine is either a byte comparison with the file or the float64 oracle.
#include "cli/verify_golden.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/convert.h"
#include "cli/quality.h"
#include "cli/safetensors.h"
#include "cli/staged.h"
#include "kvtile/attention.h"
#include "kvtile/codec.h"
#include "src/attention/reference.h"
#include "src/codec/codebook.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

// The peer rotates in float32: a coordinate this close to a decision bound, in units of sigma, can
// fall on either side; and no more than this share of all coordinates may. A coordinate on the
// bound itself (rotating a constant key gives zeros) is decided by the peer's summation order
// alone: those are counted apart, since how many there are says nothing about either side.
constexpr double kTieDistance = 2e-6;
constexpr double kTieShare = 1e-4;
constexpr double kOnTheBound = 1e-12;
// The peer divides values by their scale with the GPU's approximate reciprocal, which is off by up
// to one unit in the last place. With the roundings of the product and of adding one half, a code
// can differ where steps + 0.5 lies this close, relative to itself, to an integer.
constexpr double kValueTieDistance = 3e-7;
// Tolerances of the file's outputs, which were made from rows rounded to fp16.
constexpr double kGoldenOutput = 1e-3;  // of the largest visible |value|
constexpr double kGoldenLse = 2e-3;

struct GoldenCase {
  std::string name;
  SlotFormat format;
  PageLayout layout = PageLayout::kTokenMajor;
  int num_heads = 0, num_kv_heads = 0, block_size = 0;
  int64_t cached_len = 0, q_len = 0, num_blocks = 0;
  float softmax_scale = 0;
  DType dtype = DType::kBFloat16;

  const SafetensorsTensor *query = nullptr, *key = nullptr, *value = nullptr;
  std::vector<std::byte> pages;
  std::vector<int32_t> block_table;
  std::vector<int64_t> slot_mapping;
  std::vector<uint16_t> key_dequant, value_dequant;  // [num_kv_heads, seq, head_dim] fp16
  std::vector<float> centroids, midpoints;
  std::vector<float> continuation_output, continuation_lse, packed_output;
  std::vector<float> query_f32, key_f32, value_f32;

  int64_t seq() const { return cached_len + q_len; }
  int head_dim() const { return format.head_dim; }
  PagedCache cache(std::vector<std::byte>& bytes) const {
    return make_cache(bytes.data(), num_blocks, block_size, num_kv_heads, format, layout);
  }
  // Offset of a row of a [tokens, num_kv_heads, head_dim] tensor.
  size_t row(int64_t token, int head) const {
    return static_cast<size_t>((token * num_kv_heads + head) * head_dim());
  }
  // The same row in a [num_kv_heads, tokens, head_dim] tensor.
  size_t dequant_row(int64_t token, int head) const {
    return static_cast<size_t>((head * seq() + token) * head_dim());
  }
};

// A field of a case's description; all of them are strings.
Status read_field(const nlohmann::json& description, const std::string& case_name,
                  const char* field, std::string* out) {
  const auto it = description.find(field);
  if (it == description.end() || !it->is_string()) {
    return invalid(fmt::format("metadata cases {}: {}", quote_name(case_name), field), "nothing",
                   "a string");
  }
  *out = it->get<std::string>();
  return {};
}

Status read_number(const nlohmann::json& description, const std::string& case_name,
                   const char* field, double least, double most, double* out) {
  std::string text;
  KVTILE_RETURN_IF_ERROR(read_field(description, case_name, field, &text));
  char* end = nullptr;
  *out = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(*out >= least && *out <= most)) {
    return invalid(fmt::format("metadata cases {}: {}", quote_name(case_name), field),
                   quote_name(text), fmt::format("a number in {}..{}", least, most));
  }
  return {};
}

class Loader {
 public:
  Loader(const SafetensorsFile& file, std::string case_name)
      : file_(file), case_name_(std::move(case_name)) {}

  // The case's tensor of that name, which must have this dtype (any of query's, if empty) and
  // shape.
  Status tensor(const char* name, std::string_view dtype, const std::vector<int64_t>& shape,
                const SafetensorsTensor** out) const {
    const std::string full = case_name_ + "/" + name;
    const SafetensorsTensor* found = file_.find(full);
    const std::string subject = fmt::format("{}: tensor {}", file_.path(), quote_name(full));
    if (found == nullptr) return invalid(subject, "nothing", "a tensor of that name");
    if (found->dtype != dtype) return invalid(subject + ": dtype", found->dtype, dtype);
    if (found->shape != shape) {
      return invalid(subject + ": shape", found->shape_text(),
                     fmt::format("[{}]", join_numbers(shape)));
    }
    *out = found;
    return {};
  }

  template <typename T>
  Status copy(const char* name, std::string_view dtype, const std::vector<int64_t>& shape,
              std::vector<T>* out) const {
    const SafetensorsTensor* found = nullptr;
    KVTILE_RETURN_IF_ERROR(tensor(name, dtype, shape, &found));
    *out = found->copy<T>();
    return {};
  }

 private:
  const SafetensorsFile& file_;
  std::string case_name_;
};

Status load_description(const nlohmann::json& description, GoldenCase* c) {
  std::string preset, fp8, layout;
  double head_dim, num_heads, num_kv_heads, block_size, cached_len, q_len, scale, slot_size;
  constexpr double kMost = 1 << 20;
  const auto number = [&](const char* field, double least, double* out) {
    return read_number(description, c->name, field, least, kMost, out);
  };
  KVTILE_RETURN_IF_ERROR(read_field(description, c->name, "preset", &preset));
  KVTILE_RETURN_IF_ERROR(read_field(description, c->name, "fp8", &fp8));
  KVTILE_RETURN_IF_ERROR(read_field(description, c->name, "layout", &layout));
  KVTILE_RETURN_IF_ERROR(number("head_dim", 1, &head_dim));
  KVTILE_RETURN_IF_ERROR(number("num_heads", 1, &num_heads));
  KVTILE_RETURN_IF_ERROR(number("num_kv_heads", 1, &num_kv_heads));
  KVTILE_RETURN_IF_ERROR(number("block_size", 1, &block_size));
  KVTILE_RETURN_IF_ERROR(number("cached_len", 0, &cached_len));
  KVTILE_RETURN_IF_ERROR(number("q_len", 1, &q_len));
  KVTILE_RETURN_IF_ERROR(number("softmax_scale", 0, &scale));
  KVTILE_RETURN_IF_ERROR(number("slot_size", 1, &slot_size));
  const std::string subject = fmt::format("metadata cases {}", quote_name(c->name));
  if (fp8 != "e4m3" && fp8 != "e4b15") {
    return invalid(subject + ": fp8", quote_name(fp8), "e4m3 or e4b15");
  }
  if (layout == "num_blocks,block_size,num_kv_heads,slot") {
    c->layout = PageLayout::kTokenMajor;
  } else if (layout == "num_blocks,num_kv_heads,block_size,slot") {
    c->layout = PageLayout::kHeadMajor;
  } else {
    return invalid(subject + ": layout", quote_name(layout), "a token-major or head-major order");
  }
  KVTILE_RETURN_IF_ERROR(parse_preset(preset, static_cast<int>(head_dim), &c->format,
                                      fp8 == "e4m3" ? KeyCode::kFp8E4M3 : KeyCode::kFp8E4B15));
  if (static_cast<int>(slot_size) != c->format.slot_bytes()) {
    return invalid(subject + ": slot_size", slot_size, fmt::format("{}", c->format.slot_bytes()));
  }
  if (std::fmod(num_heads, num_kv_heads) != 0) {
    return invalid(subject + ": num_heads", num_heads, "a multiple of num_kv_heads");
  }
  c->num_heads = static_cast<int>(num_heads);
  c->num_kv_heads = static_cast<int>(num_kv_heads);
  c->block_size = static_cast<int>(block_size);
  c->cached_len = static_cast<int64_t>(cached_len);
  c->q_len = static_cast<int64_t>(q_len);
  c->softmax_scale = static_cast<float>(scale);
  return {};
}

Status load_case(const SafetensorsFile& file, const nlohmann::json& description, GoldenCase* c) {
  KVTILE_RETURN_IF_ERROR(load_description(description, c));
  const Loader loader(file, c->name);
  const SafetensorsTensor* any_key = file.find(c->name + "/key");
  const std::string dtype = any_key == nullptr ? "BF16" : any_key->dtype;
  if (!dtype_from_name(dtype, &c->dtype)) {
    return invalid(fmt::format("{}: tensor {}: dtype", file.path(), quote_name(c->name + "/key")),
                   dtype, "BF16, F16 or F32");
  }
  const int64_t seq = c->seq(), dim = c->head_dim(), heads = c->num_heads, kv = c->num_kv_heads;
  const int64_t table_blocks = (seq + c->block_size - 1) / c->block_size;
  KVTILE_RETURN_IF_ERROR(loader.tensor("key", dtype, {seq, kv, dim}, &c->key));
  KVTILE_RETURN_IF_ERROR(loader.tensor("value", dtype, {seq, kv, dim}, &c->value));
  KVTILE_RETURN_IF_ERROR(loader.tensor("query", dtype, {c->q_len, heads, dim}, &c->query));

  const SafetensorsTensor* pool = file.find(c->name + "/kv_cache");
  if (pool != nullptr && !pool->shape.empty()) c->num_blocks = pool->shape[0];
  const int64_t inner = c->layout == PageLayout::kTokenMajor ? c->block_size : kv;
  const int64_t outer = c->layout == PageLayout::kTokenMajor ? kv : c->block_size;
  KVTILE_RETURN_IF_ERROR(loader.copy(
      "kv_cache", "U8", {c->num_blocks, inner, outer, c->format.slot_bytes()}, &c->pages));
  KVTILE_RETURN_IF_ERROR(loader.copy("block_table", "I32", {1, table_blocks}, &c->block_table));
  std::vector<int32_t> slots;
  KVTILE_RETURN_IF_ERROR(loader.copy("slot_mapping", "I32", {seq}, &slots));
  c->slot_mapping.assign(slots.begin(), slots.end());
  for (int64_t slot : c->slot_mapping) {
    if (slot < 0 || slot >= c->num_blocks * c->block_size) {
      return invalid(
          fmt::format("{}: tensor {}", file.path(), quote_name(c->name + "/slot_mapping")), slot,
          fmt::format("0..{}", c->num_blocks * c->block_size - 1));
    }
  }
  const std::vector<int64_t> rows = {kv, seq, dim}, output = {c->q_len, heads, dim};
  KVTILE_RETURN_IF_ERROR(loader.copy("key_dequant", "F16", rows, &c->key_dequant));
  KVTILE_RETURN_IF_ERROR(loader.copy("value_dequant", "F16", rows, &c->value_dequant));
  KVTILE_RETURN_IF_ERROR(
      loader.copy("continuation_output", "F32", output, &c->continuation_output));
  KVTILE_RETURN_IF_ERROR(
      loader.copy("continuation_lse", "F32", {heads, c->q_len}, &c->continuation_lse));
  KVTILE_RETURN_IF_ERROR(loader.copy("packed_output", "F32", output, &c->packed_output));
  if (c->format.rotated()) {
    const int64_t levels = int64_t{1} << key_bits(c->format.key);
    KVTILE_RETURN_IF_ERROR(loader.copy("centroids", "F32", {levels}, &c->centroids));
    KVTILE_RETURN_IF_ERROR(loader.copy("midpoints", "F32", {levels - 1}, &c->midpoints));
  }
  const auto widen_tensor = [&](const SafetensorsTensor& tensor) {
    std::vector<float> wide(static_cast<size_t>(tensor.num_elements()));
    widen(tensor.data, c->dtype, tensor.num_elements(), wide.data());
    return wide;
  };
  c->query_f32 = widen_tensor(*c->query);
  c->key_f32 = widen_tensor(*c->key);
  c->value_f32 = widen_tensor(*c->value);
  return {};
}

class CaseChecker {
 public:
  CaseChecker(GoldenCase& c, const RunOptions& options,
              const std::function<void(GoldenCheck)>& emit)
      : c_(c), options_(options), emit_(emit) {}

  void run() {
    if (c_.format.rotated()) check_codebook();
    if (const Status refused = supported(); refused.code() == StatusCode::kUnsupported) {
      emit("backend", true, "not run: " + refused.message());
      return;
    }
    if (!check_decode()) return;
    check_encode();
    check_attend(/*raw_chunk=*/true);
    check_attend(/*raw_chunk=*/false);
    report_quality();
  }

  struct Ties {
    int64_t keys = 0, keys_on_bound = 0, key_coordinates = 0;
    int64_t values = 0, value_coordinates = 0;
    int64_t norms = 0;
    void add(const Ties& other) {
      keys += other.keys;
      keys_on_bound += other.keys_on_bound;
      key_coordinates += other.key_coordinates;
      values += other.values;
      value_coordinates += other.value_coordinates;
      norms += other.norms;
    }
  };
  const Ties& ties() const { return ties_; }

 private:
  void emit(const char* check, bool ok, std::string detail) {
    emit_(GoldenCheck{c_.name, check, ok, std::move(detail)});
  }
  // True if Ok; else the check failed with the status's text.
  bool expect_ok(const char* check, const Status& status) {
    if (!status.ok()) emit(check, false, status.message());
    return status.ok();
  }

  void check_codebook() {
    const Codebook book = make_codebook(c_.format.key, c_.head_dim());
    const bool ok = std::equal(c_.centroids.begin(), c_.centroids.end(), book.levels) &&
                    std::equal(c_.midpoints.begin(), c_.midpoints.end(), book.bounds);
    emit("codebook", ok,
         fmt::format("{} levels and {} bounds bit for bit", c_.centroids.size(),
                     c_.midpoints.size()));
  }

  // Whether the backend has the case's shape at all.
  Status supported() {
    AttentionCall call;
    call.cache = c_.cache(c_.pages);
    call.num_heads = c_.num_heads;
    call.num_seqs = 1;
    call.total_q = c_.q_len;
    return backend_supports(options_.backend, call, options_.device);
  }

  // Rows of both kinds, read back as fp32 and rounded here and as fp16 directly, against the file.
  bool check_decode() {
    const size_t count = c_.key_f32.size();
    std::vector<float> key32(count), value32(count);
    std::vector<uint16_t> key16(count), value16(count);
    DecodeCall call;
    call.cache = c_.cache(c_.pages);
    call.slot_mapping = c_.slot_mapping.data();
    call.num_tokens = c_.seq();
    call.key = key32.data();
    call.value = value32.data();
    call.dtype = DType::kFloat32;
    if (!expect_ok("decode", staged_decode(call, options_))) return false;
    call.key = key16.data();
    call.value = value16.data();
    call.dtype = DType::kFloat16;
    if (!expect_ok("decode", staged_decode(call, options_))) return false;
    compare_rows("decode_key", key32, key16, c_.key_dequant);
    compare_rows("decode_value", value32, value16, c_.value_dequant);
    decoded_key_ = std::move(key32);
    return true;
  }

  void compare_rows(const char* check, const std::vector<float>& f32,
                    const std::vector<uint16_t>& f16, const std::vector<uint16_t>& golden) {
    int64_t wrong = 0;
    std::string first;
    for (int64_t t = 0; t < c_.seq(); ++t) {
      for (int h = 0; h < c_.num_kv_heads; ++h) {
        for (int d = 0; d < c_.head_dim(); ++d) {
          const size_t i = c_.row(t, h) + static_cast<size_t>(d);
          const uint16_t want = golden[c_.dequant_row(t, h) + static_cast<size_t>(d)];
          const uint16_t rounded = float_to_half(f32[i]);
          if (rounded == want && f16[i] == want) continue;
          if (wrong++ == 0) {
            first =
                fmt::format(", first at token {} head {} dim {}: {:#06x} and {:#06x} for {:#06x}",
                            t, h, d, rounded, f16[i], want);
          }
        }
      }
    }
    emit(check, wrong == 0, fmt::format("{} of {} elements differ{}", wrong, golden.size(), first));
  }

  // Encodes into a pool of a fill byte, so that a byte written outside the named slots shows.
  void check_encode() {
    constexpr std::byte kFill{0xa5};
    std::vector<std::byte> pool(c_.pages.size(), kFill);
    const std::vector<std::byte> key_bytes = c_.key->copy<std::byte>();
    const std::vector<std::byte> value_bytes = c_.value->copy<std::byte>();
    EncodeCall call;
    call.key = key_bytes.data();
    call.value = value_bytes.data();
    call.dtype = c_.dtype;
    call.num_tokens = c_.seq();
    call.slot_mapping = c_.slot_mapping.data();
    call.cache = c_.cache(pool);
    if (!expect_ok("encode", staged_encode(call, options_))) return;

    int64_t wrong_keys = 0, wrong_values = 0;
    std::string first_key, first_value;
    for (int64_t t = 0; t < c_.seq(); ++t) {
      for (int h = 0; h < c_.num_kv_heads; ++h) {
        const int64_t slot = c_.slot_mapping[static_cast<size_t>(t)];
        const int64_t offset =
            call.cache.slot_offset(slot / c_.block_size, slot % c_.block_size, h);
        std::byte* got = pool.data() + offset;
        const std::byte* want = c_.pages.data() + offset;
        const bool key_ok = c_.format.rotated()
                                ? explain_rotated_key(got, want, c_.row(t, h))
                                : std::equal(got, got + c_.format.key_bytes(), want);
        const bool value_ok = explain_value(got, want, c_.row(t, h));
        const std::string where = fmt::format(", first at token {} head {}", t, h);
        if (!key_ok && wrong_keys++ == 0) first_key = where;
        if (!value_ok && wrong_values++ == 0) first_value = where;
        std::fill_n(got, c_.format.slot_bytes(), kFill);
      }
    }
    const int64_t rows = c_.seq() * c_.num_kv_heads;
    ties_.value_coordinates += rows * c_.head_dim();
    if (c_.format.rotated()) ties_.key_coordinates += rows * c_.head_dim();
    emit("encode_key", wrong_keys == 0,
         fmt::format("{} of {} keys differ unexplained{}; ties: {} codes near a bound, {} on it, "
                     "{} norms",
                     wrong_keys, rows, first_key, ties_.keys, ties_.keys_on_bound, ties_.norms));
    emit("encode_value", wrong_values == 0,
         fmt::format("{} of {} values (codes, scale, zero) differ unexplained{}; ties: {} codes",
                     wrong_values, rows, first_value, ties_.values));
    const int64_t stray =
        static_cast<int64_t>(pool.size()) - std::count(pool.begin(), pool.end(), kFill);
    emit("encode_bounds", stray == 0,
         fmt::format("{} bytes written outside the named slots", stray));
  }

  // True if every difference of one slot's key codes and norm is a tie; counts them.
  bool explain_rotated_key(const std::byte* got, const std::byte* want, size_t row) {
    const int norm_offset = c_.format.norm_offset();
    if (std::equal(got, got + norm_offset + 2, want)) return true;
    const int dim = c_.head_dim();
    std::vector<double> y(c_.key_f32.begin() + static_cast<std::ptrdiff_t>(row),
                          c_.key_f32.begin() + static_cast<std::ptrdiff_t>(row) + dim);
    double sum = 0;
    for (double x : y) sum += x * x;
    const double norm = std::sqrt(sum);
    reference_hadamard(y.data(), dim);
    const double sigma = 1 / std::sqrt(static_cast<double>(dim));
    const int bits = key_bits(c_.format.key);
    bool explained = true;
    for (int d = 0; d < dim; ++d) {
      const int a = code_at(got, d, bits), b = code_at(want, d, bits);
      if (a == b) continue;
      const double coordinate = y[static_cast<size_t>(d)] / (norm + 1e-8);
      const double bound = static_cast<double>(c_.midpoints[static_cast<size_t>(std::min(a, b))]);
      const double distance = std::fabs(coordinate - bound) / sigma;
      if (std::abs(a - b) == 1 && distance <= kTieDistance) {
        ++(distance <= kOnTheBound ? ties_.keys_on_bound : ties_.keys);
      } else {
        explained = false;
      }
    }
    const uint16_t a = load_half_word(got + norm_offset), b = load_half_word(want + norm_offset);
    if (a == b) return explained;
    const double middle =
        0.5 * (static_cast<double>(half_to_float(a)) + static_cast<double>(half_to_float(b)));
    if (std::abs(a - b) != 1 || std::fabs(norm - middle) > kTieDistance * norm) return false;
    ++ties_.norms;
    return explained;
  }

  // The same for its value: scale and zero exactly, codes up to ties.
  bool explain_value(const std::byte* got, const std::byte* want, size_t row) {
    const SlotFormat& format = c_.format;
    if (!std::equal(got + format.scale_offset(), got + format.slot_bytes(),
                    want + format.scale_offset())) {
      return false;
    }
    const float* value = &c_.value_f32[row];
    const auto [low, high] = std::minmax_element(value, value + format.head_dim);
    const int bits = value_bits(format.value);
    const float step = 1.0f / static_cast<float>((1 << bits) - 1);
    const double scale = static_cast<double>(std::max((*high - *low) * step, 1e-8f));
    bool explained = true;
    for (int d = 0; d < format.head_dim; ++d) {
      const int a = code_at(got + format.value_offset(), d, bits);
      const int b = code_at(want + format.value_offset(), d, bits);
      if (a == b) continue;
      const double steps = static_cast<double>(value[d] - *low) / scale + 0.5;
      const double bound = std::max(a, b);
      if (std::abs(a - b) == 1 && std::fabs(steps - bound) <= kValueTieDistance * bound) {
        ++ties_.values;
      } else {
        explained = false;
      }
    }
    return explained;
  }

  static int code_at(const std::byte* codes, int index, int bits) {
    const int bit = index * bits;
    int window = std::to_integer<int>(codes[bit / 8]);
    if (bit % 8 + bits > 8) window |= std::to_integer<int>(codes[bit / 8 + 1]) << 8;
    return (window >> (bit % 8)) & ((1 << bits) - 1);
  }

  // attend() with fp32 queries and outputs, against the file and against the oracle.
  void check_attend(bool raw_chunk) {
    const char* name = raw_chunk ? "attend_raw_chunk" : "attend_packed";
    const size_t rows = static_cast<size_t>(c_.q_len) * static_cast<size_t>(c_.num_heads);
    std::vector<float> out(rows * static_cast<size_t>(c_.head_dim())), lse(rows);
    const std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(c_.q_len)};
    const std::vector<int32_t> seq_lens = {static_cast<int32_t>(c_.seq())};
    AttentionCall call;
    call.query = c_.query_f32.data();
    call.out = out.data();
    call.lse = lse.data();
    call.dtype = DType::kFloat32;
    call.num_seqs = 1;
    call.total_q = c_.q_len;
    call.num_heads = c_.num_heads;
    call.softmax_scale = c_.softmax_scale;
    call.cache = c_.cache(c_.pages);
    call.block_table = c_.block_table.data();
    call.max_blocks = static_cast<int64_t>(c_.block_table.size());
    call.cu_seqlens_q = cu_seqlens.data();
    call.seq_lens = seq_lens.data();
    if (raw_chunk) {
      call.chunk_key = c_.key_f32.data() + c_.row(c_.cached_len, 0);
      call.chunk_value = c_.value_f32.data() + c_.row(c_.cached_len, 0);
    }
    if (!expect_ok(name, staged_attend(call, options_))) return;
    compare_golden(name, raw_chunk, out, lse);
    compare_oracle(raw_chunk ? "oracle_raw_chunk" : "oracle_packed", call, raw_chunk, out, lse);
  }

  // Largest |value| that row `i` of the chunk sees through KV head `h`.
  double visible_peak(int64_t i, int h, bool raw_chunk) const {
    double peak = 0;
    for (int64_t t = 0; t <= c_.cached_len + i; ++t) {
      const bool raw = raw_chunk && t >= c_.cached_len;
      for (int d = 0; d < c_.head_dim(); ++d) {
        const size_t k = static_cast<size_t>(d);
        const float v = raw ? c_.value_f32[c_.row(t, h) + k]
                            : half_to_float(c_.value_dequant[c_.dequant_row(t, h) + k]);
        peak = std::max(peak, static_cast<double>(std::fabs(v)));
      }
    }
    return peak;
  }

  // Worst output error in units of its bound, and worst lse error.
  struct Worst {
    double output = 0, output_limit = 0, lse = 0, lse_limit = 0;
    bool ok = true;
    void add_output(double got, double want, double limit) {
      const double error = std::fabs(got - want);
      if (!(error <= limit)) ok = false;
      if (!(error * output_limit <= output * limit) || output_limit == 0) {
        output = error;
        output_limit = limit;
      }
    }
    void add_lse(double got, double want, double limit) {
      const double error = std::fabs(got - want);
      if (!(error <= limit)) ok = false;
      if (!(error * lse_limit <= lse * limit) || lse_limit == 0) {
        lse = error;
        lse_limit = limit;
      }
    }
    std::string text() const {
      return fmt::format("|output| off by {:.1e} (bound {:.1e})", output, output_limit) +
             (lse_limit > 0 ? fmt::format(", lse by {:.1e} (bound {:.1e})", lse, lse_limit) : "");
    }
  };

  // How far rounding the decoded keys to fp16, as the file's own attention read them, moves a score
  // of this row; no lse moves further by it. It matters for keys in the hundreds only.
  double score_rounding(int64_t i, int h) const {
    const int group = c_.num_heads / c_.num_kv_heads;
    const std::vector<double> query = query_in_key_space(i, h);
    double worst = 0;
    for (int64_t t = 0; t < c_.cached_len; ++t) {
      const float* exact = &decoded_key_[c_.row(t, h / group)];
      const uint16_t* rounded = &c_.key_dequant[c_.dequant_row(t, h / group)];
      double shift = 0;
      for (size_t d = 0; d < query.size(); ++d) {
        shift += query[d] *
                 (static_cast<double>(exact[d]) - static_cast<double>(half_to_float(rounded[d])));
      }
      worst = std::max(worst, std::fabs(shift) * static_cast<double>(c_.softmax_scale));
    }
    return worst;
  }

  // How far fp16 operands move a score of this row: an engine that multiplies them is allowed twice
  // that in an lse, since it may round at another scale. Keys in the hundreds make scores whose
  // rounding is no longer small beside 1.
  double operand_rounding(int64_t i, int h, bool raw_chunk) const {
    if (!is_cuda_backend(options_.backend)) return 0;
    const auto to_half = [](double x) {
      int exponent = 0;
      return std::ldexp(std::nearbyint(std::ldexp(std::frexp(x, &exponent), 11)), exponent - 11);
    };
    const int kv_head = h / (c_.num_heads / c_.num_kv_heads);
    const std::vector<double> query = query_in_key_space(i, h);
    std::vector<double> key(query.size());
    double worst = 0;
    for (int64_t t = 0; t <= c_.cached_len + i; ++t) {
      const bool raw = raw_chunk && t >= c_.cached_len;
      const float* row = &(raw ? c_.key_f32 : decoded_key_)[c_.row(t, kv_head)];
      std::copy_n(row, key.size(), key.begin());
      if (raw) into_key_space(&key);
      double query_shift = 0, key_shift = 0;
      for (size_t d = 0; d < query.size(); ++d) {
        query_shift += (to_half(query[d]) - query[d]) * key[d];
        key_shift += (to_half(key[d]) - key[d]) * query[d];
      }
      worst = std::max(worst, std::fabs(query_shift) + std::fabs(key_shift));
    }
    return 2 * worst * static_cast<double>(c_.softmax_scale);
  }

  // Rotation preserves dot products, so queries go to the space that keys are stored in.
  void into_key_space(std::vector<double>* x) const {
    if (c_.format.rotated()) reference_hadamard(x->data(), c_.head_dim());
  }
  std::vector<double> query_in_key_space(int64_t i, int h) const {
    const auto row =
        c_.query_f32.begin() + static_cast<std::ptrdiff_t>((i * c_.num_heads + h) * c_.head_dim());
    std::vector<double> query(row, row + c_.head_dim());
    into_key_space(&query);
    return query;
  }

  void compare_golden(const char* check, bool raw_chunk, const std::vector<float>& out,
                      const std::vector<float>& lse) {
    const std::vector<float>& golden = raw_chunk ? c_.continuation_output : c_.packed_output;
    const int group = c_.num_heads / c_.num_kv_heads;
    Worst worst;
    for (int64_t i = 0; i < c_.q_len; ++i) {
      for (int h = 0; h < c_.num_heads; ++h) {
        const double limit = kGoldenOutput * visible_peak(i, h / group, raw_chunk);
        for (int d = 0; d < c_.head_dim(); ++d) {
          const size_t k = static_cast<size_t>((i * c_.num_heads + h) * c_.head_dim() + d);
          worst.add_output(static_cast<double>(out[k]), static_cast<double>(golden[k]), limit);
        }
        if (!raw_chunk) continue;
        const size_t k = static_cast<size_t>(h * c_.q_len + i);
        const double want = static_cast<double>(c_.continuation_lse[k]);
        const double explained = score_rounding(i, h) + operand_rounding(i, h, raw_chunk) +
                                 bound_.lse * std::max(1.0, std::fabs(want));
        worst.add_lse(static_cast<double>(lse[k]), want, std::max(kGoldenLse, explained));
      }
    }
    emit(check, worst.ok, worst.text());
  }

  void compare_oracle(const char* check, const AttentionCall& call, bool raw_chunk,
                      const std::vector<float>& out, const std::vector<float>& lse) {
    const int group = c_.num_heads / c_.num_kv_heads;
    std::vector<double> want(static_cast<size_t>(c_.head_dim()));
    Worst worst;
    for (int64_t i = 0; i < c_.q_len; ++i) {
      for (int h = 0; h < c_.num_heads; ++h) {
        double want_lse = 0;
        reference_attend_row(call, i, h, want.data(), &want_lse);
        const double limit = bound_.output * visible_peak(i, h / group, raw_chunk);
        for (int d = 0; d < c_.head_dim(); ++d) {
          const size_t k = static_cast<size_t>((i * c_.num_heads + h) * c_.head_dim() + d);
          worst.add_output(static_cast<double>(out[k]), want[static_cast<size_t>(d)], limit);
        }
        worst.add_lse(
            static_cast<double>(lse[static_cast<size_t>(h * c_.q_len + i)]), want_lse,
            bound_.lse * std::max(1.0, std::fabs(want_lse)) + operand_rounding(i, h, raw_chunk));
      }
    }
    emit(check, worst.ok, worst.text());
  }

  // What the preset, not the kernel, does to these rows: never a failure, always reported.
  void report_quality() {
    const int group = c_.num_heads / c_.num_kv_heads;
    const size_t dim = static_cast<size_t>(c_.head_dim());
    double sum = 0, peak = 0;
    CosineMean cosine;
    std::vector<double> key(dim);
    std::vector<float> key_f32(dim), decoded(dim);
    for (int64_t i = 0; i < c_.q_len; ++i) {
      for (int h = 0; h < c_.num_heads; ++h) {
        const std::vector<double> query = query_in_key_space(i, h);
        std::vector<double> raw_scores, packed_scores;
        for (int64_t t = 0; t <= c_.cached_len + i; ++t) {
          std::copy_n(&c_.key_f32[c_.row(t, h / group)], dim, key.begin());
          into_key_space(&key);
          double raw = 0, packed = 0;
          for (size_t d = 0; d < dim; ++d) {
            decoded[d] = half_to_float(c_.key_dequant[c_.dequant_row(t, h / group) + d]);
            key_f32[d] = static_cast<float>(key[d]);
            raw += query[d] * key[d];
            packed += query[d] * static_cast<double>(decoded[d]);
          }
          raw_scores.push_back(raw * static_cast<double>(c_.softmax_scale));
          packed_scores.push_back(packed * static_cast<double>(c_.softmax_scale));
          if (i + 1 == c_.q_len && h % group == 0) cosine.add(decoded, key_f32);
        }
        const double distance = total_variation(raw_scores, packed_scores);
        sum += distance;
        peak = std::max(peak, distance);
      }
    }
    emit("preset_quality", true,
         fmt::format("attention distributions differ by {:.3f} on average, {:.3f} at most (total "
                     "variation); key cosine {:.4f}",
                     sum / static_cast<double>(c_.q_len * c_.num_heads), peak, cosine.mean()));
  }

  GoldenCase& c_;
  const RunOptions& options_;
  const EngineBound bound_ = engine_bound(options_.backend, DType::kFloat32);
  const std::function<void(GoldenCheck)>& emit_;
  Ties ties_;
  std::vector<float> decoded_key_;  // by check_decode(), in fp32
};

}  // namespace

Status verify_golden(const std::string& path, const RunOptions& options,
                     std::vector<GoldenCheck>* checks,
                     const std::function<void(const GoldenCheck&)>& on_check) {
  SafetensorsFile file;
  KVTILE_RETURN_IF_ERROR(SafetensorsFile::open(path, &file));
  const auto metadata = file.metadata().find("cases");
  if (metadata == file.metadata().end()) {
    return invalid(path + ": metadata cases", "nothing", "a JSON object of cases");
  }
  const nlohmann::json cases = nlohmann::json::parse(metadata->second, nullptr, false);
  if (!cases.is_object() || cases.empty()) {
    return invalid(path + ": metadata cases", quote_name(metadata->second.substr(0, 40)),
                   "a JSON object of cases");
  }

  const std::function<void(GoldenCheck)> emit = [&](GoldenCheck check) {
    if (on_check) on_check(check);
    checks->push_back(std::move(check));
  };
  CaseChecker::Ties ties;
  for (const auto& [name, description] : cases.items()) {
    GoldenCase c;
    c.name = name;
    KVTILE_RETURN_IF_ERROR(load_case(file, description, &c));
    CaseChecker checker(c, options, emit);
    checker.run();
    ties.add(checker.ties());
  }
  const auto rare = [](int64_t count, int64_t of) {
    return count == 0 || static_cast<double>(count) < kTieShare * static_cast<double>(of);
  };
  emit(GoldenCheck{
      "all cases", "tie_share",
      rare(ties.keys, ties.key_coordinates) && rare(ties.values, ties.value_coordinates),
      fmt::format("{} ties in {} key and {} in {} value coordinates (below 1 in "
                  "10,000); {} key coordinates on a bound itself",
                  ties.keys, ties.key_coordinates, ties.values, ties.value_coordinates,
                  ties.keys_on_bound)});
  return {};
}

}  // namespace kvtile
