// Float64 checks of sampled rows. Memory: one block of raw and decoded rows, and two scores a
// visible key of each sampled row.
#include "cli/prefill_check.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/convert.h"
#include "kvtile/codec.h"
#include "src/attention/reference.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

constexpr int64_t kBlockElements = 1 << 20;

// A block of consecutive tokens, [tokens, num_kv_heads, head_dim], raw and as the engine sees it.
struct Block {
  int64_t begin = 0, count = 0;
  std::vector<std::byte> raw_bytes[2];
  std::vector<float> key, value, packed_key, packed_value;
};

struct Row {
  RowSample sample;
  int kv_head = 0;
  int64_t first_key = 0;
  std::vector<double> query;
  std::vector<double> packed_output;  // by the oracle
  double packed_lse = 0;
  std::vector<double> raw_scores, packed_scores;
  // Online softmax over the raw keys and values.
  double raw_max = -std::numeric_limits<double>::infinity(), raw_sum = 0;
  std::vector<double> raw_output;
  double peak = 0;  // largest visible |value| as the engine sees it
};

double dot(const double* query, const float* key, int dim) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int d = 0; d < dim; ++d) sum += query[d] * static_cast<double>(key[d]);
  return sum;
}

class Checker {
 public:
  Checker(const AttentionCall& call, const LayerSource& source, int64_t begin, int num_threads)
      : call_(call),
        source_(source),
        begin_(begin),
        dim_(source.shape.head_dim),
        num_threads_(num_threads) {}

  Status run(std::span<const RowSample> samples, PrefillErrors* errors) {
    for (const RowSample& sample : samples) add_row(sample);
    if (rows_.empty()) return {};
    const int count = static_cast<int>(rows_.size());
#pragma omp parallel for schedule(dynamic) num_threads(num_threads_)
    for (int i = 0; i < count; ++i) {
      Row& row = rows_[static_cast<size_t>(i)];
      reference_attend_row(call_, row.sample.position - begin_, row.sample.head,
                           row.packed_output.data(), &row.packed_lse);
    }
    KVTILE_RETURN_IF_ERROR(walk_keys(errors));
    for (Row& row : rows_) finish_row(row, errors);
    return {};
  }

 private:
  void add_row(const RowSample& sample) {
    Row row;
    row.sample = sample;
    row.kv_head = sample.head / (call_.num_heads / call_.cache.num_kv_heads);
    if (call_.mask.window > 0) {
      row.first_key = std::max<int64_t>(0, sample.position - call_.mask.window + 1);
    }
    std::vector<float> query(static_cast<size_t>(dim_));
    const int64_t offset =
        ((sample.position - begin_) * call_.num_heads + sample.head) * int64_t{dim_};
    widen(static_cast<const std::byte*>(call_.query) + offset * dtype_bytes(call_.dtype),
          call_.dtype, dim_, query.data());
    row.query.assign(query.begin(), query.end());
    row.packed_output.resize(static_cast<size_t>(dim_));
    row.raw_output.resize(static_cast<size_t>(dim_));
    rows_.push_back(std::move(row));
  }

  Status walk_keys(PrefillErrors* errors) {
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
    for (const Row& row : rows_) {
      first = std::min(first, row.first_key);
      last = std::max(last, row.sample.position + 1);
    }
    const int64_t step = std::max<int64_t>(16, kBlockElements / source_.shape.kv_elements());
    Block block;
    for (int64_t t = first; t < last; t += step) {
      KVTILE_RETURN_IF_ERROR(read_block(t, std::min(step, last - t), &block));
      const int count = static_cast<int>(rows_.size());
#pragma omp parallel for schedule(dynamic) num_threads(num_threads_)
      for (int i = 0; i < count; ++i) add_keys(block, &rows_[static_cast<size_t>(i)]);
      for (int64_t i = 0; i < block.count && t + i < begin_; ++i) {
        for (int h = 0; h < call_.cache.num_kv_heads; ++h) {
          const size_t row = static_cast<size_t>((i * call_.cache.num_kv_heads + h) * dim_);
          const size_t n = static_cast<size_t>(dim_);
          errors->key_cosine.add({&block.packed_key[row], n}, {&block.key[row], n});
        }
      }
    }
    return {};
  }

  // The cached part as decoded, with keys turned back to the raw space; the chunk itself as it is.
  Status read_block(int64_t begin, int64_t count, Block* block) const {
    const LayerShape& shape = source_.shape;
    const size_t elements = static_cast<size_t>(count * shape.kv_elements());
    block->begin = begin;
    block->count = count;
    for (auto& bytes : block->raw_bytes) {
      bytes.resize(elements * static_cast<size_t>(dtype_bytes(shape.dtype)));
    }
    source_.read_key_value(begin, count, block->raw_bytes[0].data(), block->raw_bytes[1].data());
    block->key.resize(elements);
    block->value.resize(elements);
    widen(block->raw_bytes[0].data(), shape.dtype, static_cast<int64_t>(elements),
          block->key.data());
    widen(block->raw_bytes[1].data(), shape.dtype, static_cast<int64_t>(elements),
          block->value.data());
    block->packed_key = block->key;
    block->packed_value = block->value;
    const int64_t cached = std::clamp<int64_t>(begin_ - begin, 0, count);
    if (cached == 0) return {};
    std::vector<int64_t> slots(static_cast<size_t>(cached));
    for (int64_t i = 0; i < cached; ++i) {
      const int64_t t = begin + i, block_size = call_.cache.block_size;
      slots[static_cast<size_t>(i)] =
          int64_t{call_.block_table[t / block_size]} * block_size + t % block_size;
    }
    DecodeCall decode;
    decode.cache = call_.cache;
    decode.slot_mapping = slots.data();
    decode.num_tokens = cached;
    decode.key = block->packed_key.data();
    decode.value = block->packed_value.data();
    decode.dtype = DType::kFloat32;
    decode.unrotate_keys = true;
    RunOptions options;
    options.backend = "cpu";
    options.num_threads = num_threads_;
    return decode_slots(decode, options);
  }

  double score(const Row& row, const float* key) const {
    const double s = static_cast<double>(call_.softmax_scale) * dot(row.query.data(), key, dim_);
    const double cap = static_cast<double>(call_.softcap);
    return cap > 0 ? cap * std::tanh(s / cap) : s;
  }

  void add_keys(const Block& block, Row* row) const {
    const int64_t from = std::max(block.begin, row->first_key);
    const int64_t to = std::min(block.begin + block.count, row->sample.position + 1);
    for (int64_t t = from; t < to; ++t) {
      const size_t k =
          static_cast<size_t>(((t - block.begin) * call_.cache.num_kv_heads + row->kv_head) * dim_);
      row->raw_scores.push_back(score(*row, &block.key[k]));
      row->packed_scores.push_back(score(*row, &block.packed_key[k]));
      const double s = row->raw_scores.back();
      if (s > row->raw_max) {
        const double shrink = std::exp(row->raw_max - s);
        row->raw_sum *= shrink;
        for (double& x : row->raw_output) x *= shrink;
        row->raw_max = s;
      }
      const double weight = std::exp(s - row->raw_max);
      row->raw_sum += weight;
      const float* value = &block.value[k];
      const float* packed_value = &block.packed_value[k];
      float peak = 0;
      for (int d = 0; d < dim_; ++d) {
        row->raw_output[static_cast<size_t>(d)] += weight * static_cast<double>(value[d]);
        peak = std::max(peak, std::fabs(packed_value[d]));
      }
      row->peak = std::max(row->peak, static_cast<double>(peak));
    }
  }

  void finish_row(const Row& row, PrefillErrors* errors) const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    // A NaN must read as the worst error, not vanish in a comparison.
    const auto worse = [](double error, double* worst) {
      *worst = std::isnan(error) ? kInfinity : std::max(*worst, error);
    };
    std::vector<float> out(static_cast<size_t>(dim_));
    const int64_t i = row.sample.position - begin_;
    const int64_t offset = (i * call_.num_heads + row.sample.head) * int64_t{dim_};
    widen(static_cast<const std::byte*>(call_.out) + offset * dtype_bytes(call_.dtype), call_.dtype,
          dim_, out.data());
    for (int d = 0; d < dim_; ++d) {
      const size_t k = static_cast<size_t>(d);
      const double got = static_cast<double>(out[k]), want = row.packed_output[k];
      const double error = std::fabs(got - want);
      worse(error, &errors->max_abs_error);
      worse(row.peak > 0 || error > 0 ? error / row.peak : 0.0, &errors->max_error_of_peak);
      errors->kernel.add(got, want);
      errors->preset.add(want, row.raw_output[k] / row.raw_sum);
    }
    const double lse = static_cast<double>(call_.lse[row.sample.head * call_.total_q + i]);
    worse(std::fabs(lse - row.packed_lse) / std::max(1.0, std::fabs(row.packed_lse)),
          &errors->max_lse_error);
    const double distance = total_variation(row.raw_scores, row.packed_scores);
    errors->distance_sum += distance;
    errors->distance_max = std::max(errors->distance_max, distance);
    ++errors->rows;
  }

  const AttentionCall& call_;
  const LayerSource& source_;
  const int64_t begin_;
  const int dim_;
  const int num_threads_;
  std::vector<Row> rows_;
};

}  // namespace

void PrefillErrors::add(const PrefillErrors& other) {
  rows += other.rows;
  max_abs_error = std::max(max_abs_error, other.max_abs_error);
  max_error_of_peak = std::max(max_error_of_peak, other.max_error_of_peak);
  max_lse_error = std::max(max_lse_error, other.max_lse_error);
  kernel.add(other.kernel);
  preset.add(other.preset);
  distance_sum += other.distance_sum;
  distance_max = std::max(distance_max, other.distance_max);
  key_cosine.add(other.key_cosine);
}

Status check_rows(const AttentionCall& call, const LayerSource& source, int64_t begin,
                  std::span<const RowSample> samples, int num_threads, PrefillErrors* errors) {
  return Checker(call, source, begin, num_threads).run(samples, errors);
}

}  // namespace kvtile
