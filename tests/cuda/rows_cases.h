// Cases of the rows backend and their check against a float64 decoder and attention that share no
// code with it, for the emulator (rows_emulated_test.cc): memory is the runtime's, and nothing here
// launches a kernel by itself.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvtile/attention.h"
#include "src/attention/cuda/rows.h"
#include "src/codec/codebook.h"
#include "src/core/device.h"
#include "src/core/half2.h"

namespace kvtile {
namespace rows_test {

#define CHECK_CUDA(expr)                                                               \
  do {                                                                                 \
    const cudaError_t error_ = (expr);                                                 \
    if (error_ != cudaSuccess) {                                                       \
      std::printf("FATAL %s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (0)

// 32 bits of noise from an index.
inline uint32_t noise(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

// Slot bytes of (slot index): codes are noise; norm in [4, 12), scale in [1/64, 17/64), zero around
// -7.5 scale.
struct SlotBytes {
  int norm, value, scale, zero, bytes;  // norm < 0: none
  bool e4m3;
};
inline uint8_t slot_byte(const SlotBytes& f, uint64_t slot, int byte) {
  auto half = [](float x) { return float_to_half_bits(x); };
  const uint32_t n = noise(slot * 977 + 13);
  const float scale = (1.0f + 16.0f * static_cast<float>(n & 1023) / 1024.0f) / 64.0f;
  if (f.norm >= 0 && (byte == f.norm || byte == f.norm + 1)) {
    const uint16_t w = half(4.0f + 8.0f * static_cast<float>((n >> 10) & 1023) / 1024.0f);
    return static_cast<uint8_t>(byte == f.norm ? w : w >> 8);
  }
  if (byte == f.scale || byte == f.scale + 1) {
    const uint16_t w = half(scale);
    return static_cast<uint8_t>(byte == f.scale ? w : w >> 8);
  }
  if (byte == f.zero || byte == f.zero + 1) {
    const float shift = static_cast<float>(n >> 20) / 4096.0f - 0.5f;
    const uint16_t w = half(-7.5f * scale + shift);
    return static_cast<uint8_t>(byte == f.zero ? w : w >> 8);
  }
  const uint32_t code = noise(slot * 1031 + byte) & 0xff;
  if (f.e4m3 && byte < f.value) {
    // Magnitudes up to 1.875: like a normalised key.
    return static_cast<uint8_t>((code & 0x80) | (code % 0x40));
  }
  return static_cast<uint8_t>(code);
}

inline SlotBytes slot_bytes_of(const SlotFormat& f) {
  return {f.rotated() ? f.norm_offset() : -1,
          f.value_offset(),
          f.scale_offset(),
          f.zero_offset(),
          f.slot_bytes(),
          f.key == KeyCode::kFp8E4M3};
}

inline double half_value(uint16_t w) { return half_bits_to_float(w); }

inline double fp8_value(KeyCode key, uint8_t byte) {
  const double sign = (byte & 0x80) != 0 ? -1.0 : 1.0;
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  if (key == KeyCode::kFp8E4M3) {
    if ((byte & 0x7f) == 0x7f) return NAN;
    return sign *
           (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  }
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -17) : std::ldexp(8 + mantissa, exponent - 18));
}

inline uint32_t bits_at(const uint8_t* bytes, int bit, int count) {
  uint32_t x = 0;
  for (int i = 0; i < count; ++i) x |= ((bytes[(bit + i) / 8] >> ((bit + i) % 8)) & 1u) << i;
  return x;
}

inline void decode(const SlotFormat& f, const Codebook& book, const uint8_t* slot, double* key,
                   double* value) {
  auto word = [&](int at) { return static_cast<uint16_t>(slot[at] | (slot[at + 1] << 8)); };
  const int d = f.head_dim;
  if (f.rotated()) {
    const int bits = key_bits(f.key);
    double squares = 0.0;
    for (int i = 0; i < d; ++i) {
      key[i] = book.levels[bits_at(slot, i * bits, bits)];
      squares += key[i] * key[i];
    }
    const double norm = half_value(word(f.norm_offset()));
    const double scale = f.norm_correction ? norm / std::sqrt(squares) : norm;
    for (int i = 0; i < d; ++i) key[i] *= scale;
  } else {
    for (int i = 0; i < d; ++i) key[i] = fp8_value(f.key, slot[i]);
  }
  const int bits = value_bits(f.value);
  const double scale = half_value(word(f.scale_offset())), zero = half_value(word(f.zero_offset()));
  for (int i = 0; i < d; ++i) {
    value[i] = bits_at(slot + f.value_offset(), i * bits, bits) * scale + zero;
  }
}

inline void hadamard(double* x, int n) {
  for (int step = 1; step < n; step *= 2) {
    for (int i = 0; i < n; ++i) {
      if ((i & step) != 0) continue;
      const double a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  for (int i = 0; i < n; ++i) x[i] /= std::sqrt(static_cast<double>(n));
}

inline void parallel(int64_t count, const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (int64_t i; (i = next++) < count;) work(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <typename T>
struct DeviceArray {
  T* data = nullptr;
  size_t count = 0;
  explicit DeviceArray(size_t n = 0) { resize(n); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }
  void resize(size_t n) {
    cudaFree(data);
    data = nullptr;
    count = n;
    if (n > 0) CHECK_CUDA(cudaMalloc(&data, n * sizeof(T)));
  }
  void upload(const std::vector<T>& host) {
    resize(host.size());
    CHECK_CUDA(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> host(count);
    CHECK_CUDA(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

inline void append(std::vector<uint8_t>* out, DType dtype, float x) {
  if (dtype == DType::kFloat32) {
    uint32_t bits = float_bits(x);
    for (int i = 0; i < 4; ++i) out->push_back(static_cast<uint8_t>(bits >> (8 * i)));
    return;
  }
  const uint16_t w = dtype == DType::kFloat16 ? float_to_half_bits(x) : float_to_bfloat_bits(x);
  out->push_back(static_cast<uint8_t>(w));
  out->push_back(static_cast<uint8_t>(w >> 8));
}
inline double element(const std::vector<uint8_t>& data, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, data.data() + 4 * i, 4);
    return x;
  }
  uint16_t w;
  std::memcpy(&w, data.data() + 2 * i, 2);
  return dtype == DType::kFloat16 ? half_value(w) : bfloat_bits_to_float(w);
}

struct Sequence {
  int seq_len, q_len;
};

struct Case {
  const char* name = "";
  KeyCode key = KeyCode::kLloydMax4;
  ValueCode value = ValueCode::kUniform4;
  bool norm_correction = true;
  int head_dim = 128, num_heads = 8, num_kv_heads = 2, block_size = 16;
  std::vector<Sequence> seqs;
  PageLayout layout = PageLayout::kTokenMajor;
  int slot_stride = 0, base_offset = 0;
  DType dtype = DType::kFloat32;
  bool chunk = false, causal = true, sinks = false, lse = true;
  int64_t window = 0;
  float softcap = 0.0f, query_size = 1.0f, scale = 0.0f;
  int first_block = 0;  // blocks cut from the table's front
  int64_t extra_q = 0;  // rows of no sequence
  int64_t max_q_len = 0;
  double tolerance = 1.5e-3;
  // Changes to slots and tables before the run.
  std::function<void(Case&, std::vector<uint8_t>&, std::vector<int32_t>&)> edit;
};

inline int failures = 0;
inline void report(const std::string& name, bool ok, const std::string& detail) {
  std::printf("%s %-44s %s\n", ok ? "ok  " : "FAIL", name.c_str(), detail.c_str());
  if (!ok) ++failures;
}

struct Run {
  AttentionCall call;
  DeviceArray<uint8_t> pool, query, chunk_key, chunk_value, out, workspace;
  DeviceArray<int32_t> table, cu, lens, first;
  DeviceArray<float> lse, sinks;
  std::vector<uint8_t> host_pool, host_query, host_ck, host_cv;
  std::vector<int32_t> host_table, host_cu, host_first;
  std::vector<float> host_sinks;
  int64_t max_blocks = 0;
};

inline void build(const Case& c0, Run* r, uint32_t seed) {
  Case c = c0;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const SlotFormat format{c.head_dim, c.key, c.value, c.norm_correction};
  int64_t blocks = 0, total_q = 0, widest = 1;
  for (const Sequence& s : c.seqs) {
    const int64_t n = (std::max(s.seq_len, 0) + c.block_size - 1) / c.block_size;
    blocks += n;
    widest = std::max(widest, n);
    total_q += s.q_len;
  }
  blocks += 3;
  const int stride = c.slot_stride > 0 ? c.slot_stride : format.slot_bytes();
  const int64_t bytes = blocks * c.block_size * c.num_kv_heads * stride;
  r->host_pool.assign(static_cast<size_t>(bytes + c.base_offset), 0xff);
  PagedCache cache =
      make_cache(nullptr, blocks, c.block_size, c.num_kv_heads, format, c.layout, c.slot_stride);
  std::vector<int32_t> pages(static_cast<size_t>(blocks));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  r->max_blocks = widest;
  r->host_table.assign(c.seqs.size() * static_cast<size_t>(widest), 0x7fffffff);
  r->host_cu = {0};
  std::vector<int32_t> lens;
  int64_t used = 0;
  const SlotBytes bytes_of = slot_bytes_of(format);
  uint64_t slot_id = seed * 7919ull;
  for (size_t s = 0; s < c.seqs.size(); ++s) {
    const int len = std::max(c.seqs[s].seq_len, 0);
    for (int64_t b = 0; b * c.block_size < len; ++b) {
      const int32_t page = pages[static_cast<size_t>(used++)];
      if (b >= c.first_block) {
        r->host_table[s * static_cast<size_t>(widest) + static_cast<size_t>(b - c.first_block)] =
            page;
      }
      for (int t = 0; t < c.block_size && b * c.block_size + t < len; ++t) {
        // A raw chunk's own tokens are not in the cache yet.
        if (c.chunk && b * c.block_size + t >= len - c.seqs[s].q_len) continue;
        for (int h = 0; h < c.num_kv_heads; ++h, ++slot_id) {
          uint8_t* slot = r->host_pool.data() + c.base_offset + cache.slot_offset(page, t, h);
          for (int i = 0; i < format.slot_bytes(); ++i) slot[i] = slot_byte(bytes_of, slot_id, i);
        }
      }
    }
    r->host_cu.push_back(r->host_cu.back() + c.seqs[s].q_len);
    lens.push_back(c.seqs[s].seq_len);
  }
  if (c.edit) c.edit(c, r->host_pool, r->host_table);
  total_q += c.extra_q;
  const int64_t d = c.head_dim;
  for (int64_t i = 0; i < total_q * c.num_heads * d; ++i) {
    append(&r->host_query, c.dtype, c.query_size * normal(random));
  }
  if (c.chunk) {
    for (int64_t i = 0; i < total_q * c.num_kv_heads * d; ++i) {
      append(&r->host_ck, c.dtype, 0.5f * normal(random));
      append(&r->host_cv, c.dtype, normal(random));
    }
    r->chunk_key.upload(r->host_ck);
    r->chunk_value.upload(r->host_cv);
  }
  for (int h = 0; h < c.num_heads; ++h) r->host_sinks.push_back(1.0f + 0.5f * normal(random));
  r->pool.upload(r->host_pool);
  r->query.upload(r->host_query);
  r->table.upload(r->host_table);
  r->cu.upload(r->host_cu);
  r->lens.upload(lens);
  r->sinks.upload(r->host_sinks);
  r->host_first.assign(c.seqs.size(), c.first_block * c.block_size);
  if (c.first_block > 0) r->first.upload(r->host_first);
  std::vector<uint8_t> poison(static_cast<size_t>(total_q * c.num_heads * d * dtype_bytes(c.dtype)),
                              0xff);
  r->out.upload(poison);
  r->lse.upload(std::vector<float>(static_cast<size_t>(total_q * c.num_heads), NAN));

  AttentionCall& call = r->call;
  call.query = r->query.data;
  call.out = r->out.data;
  call.lse = c.lse ? r->lse.data : nullptr;
  call.dtype = c.dtype;
  call.num_seqs = static_cast<int>(c.seqs.size());
  call.total_q = total_q;
  call.num_heads = c.num_heads;
  call.softmax_scale = c.scale != 0.0f ? c.scale : 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  call.softcap = c.softcap;
  call.sinks = c.sinks ? r->sinks.data : nullptr;
  call.mask = {c.causal, c.window};
  call.cache = cache;
  call.cache.pages = reinterpret_cast<std::byte*>(r->pool.data + c.base_offset);
  call.block_table = r->table.data;
  call.max_blocks = r->max_blocks;
  call.cu_seqlens_q = r->cu.data;
  call.seq_lens = r->lens.data;
  call.first_positions = c.first_block > 0 ? r->first.data : nullptr;
  call.chunk_key = c.chunk ? r->chunk_key.data : nullptr;
  call.chunk_value = c.chunk ? r->chunk_value.data : nullptr;
  call.max_q_len = c.max_q_len;
}

inline bool launch(Run* r, const DeviceInfo& device) {
  size_t bytes = 0;
  Status status = cuda::cuda_rows_workspace_bytes(r->call, device, &bytes);
  if (status.ok()) {
    if (r->workspace.count != bytes) {
      r->workspace.resize(bytes);
      CHECK_CUDA(cudaMemset(r->workspace.data, 0xff, bytes));
    }
    status = cuda::cuda_rows_run(r->call, {r->workspace.data, bytes}, device, nullptr);
  }
  if (!status.ok()) std::printf("status: %s\n", status.message().c_str());
  return status.ok();
}

// One row in float64. Returns false for rows of no sequence.
inline void reference(const Case& c, const Run& r, int64_t row, int head, std::vector<double>* out,
                      double* lse) {
  const int d = c.head_dim;
  const SlotFormat format{d, c.key, c.value, c.norm_correction};
  const Codebook book = format.rotated() ? make_codebook(c.key, d) : Codebook{};
  out->assign(static_cast<size_t>(d), 0.0);
  *lse = -INFINITY;
  size_t s = 0;
  while (s + 1 < r.host_cu.size() && row >= r.host_cu[s + 1]) ++s;
  if (s + 1 >= r.host_cu.size()) return;
  const int64_t seq_len = c.seqs[s].seq_len, q_len = c.seqs[s].q_len;
  const int64_t position = seq_len - q_len + row - r.host_cu[s];
  if (position < 0) return;
  const int64_t begin = c.window > 0 ? std::max<int64_t>(0, position - c.window + 1) : 0;
  const int64_t end = c.causal ? position + 1 : seq_len;
  std::vector<double> q(static_cast<size_t>(d)), qr;
  for (int i = 0; i < d; ++i) {
    q[i] = element(r.host_query, c.dtype, (row * c.num_heads + head) * d + i);
  }
  qr = q;
  if (format.rotated()) hadamard(qr.data(), d);
  const int kv = head / (c.num_heads / c.num_kv_heads);
  const int64_t n = end - begin;
  if (n <= 0) return;
  std::vector<double> key(d), value(d), scores, values;
  double high = c.sinks ? static_cast<double>(r.host_sinks[head]) : -INFINITY;
  scores.reserve(n);
  values.reserve(static_cast<size_t>(n * d));
  for (int64_t p = begin; p < end; ++p) {
    const std::vector<double>* query = &qr;
    bool missing = false;
    if (c.chunk && p >= seq_len - q_len) {
      const int64_t at = ((r.host_cu[s] + p - (seq_len - q_len)) * c.num_kv_heads + kv) * d;
      for (int i = 0; i < d; ++i) {
        key[i] = element(r.host_ck, c.dtype, at + i);
        value[i] = element(r.host_cv, c.dtype, at + i);
      }
      query = &q;
    } else {
      const int64_t block = p / c.block_size - c.first_block;
      const int64_t page =
          block < 0 || block >= r.max_blocks
              ? -1
              : r.host_table[s * static_cast<size_t>(r.max_blocks) + static_cast<size_t>(block)];
      missing = page < 0 || page >= r.call.cache.num_blocks;
      if (!missing) {
        decode(format, book,
               r.host_pool.data() + c.base_offset +
                   r.call.cache.slot_offset(page, p % c.block_size, kv),
               key.data(), value.data());
      }
    }
    double score = 0.0;
    for (int i = 0; i < d; ++i) score += (*query)[i] * key[i];
    score *= r.call.softmax_scale;
    if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
    if (missing) score = NAN;
    scores.push_back(score);
    high = std::isnan(score) ? NAN : std::max(high, score);
    values.insert(values.end(), value.begin(), value.end());
  }
  double sum = c.sinks ? std::exp(r.host_sinks[head] - high) : 0.0;
  for (int64_t j = 0; j < n; ++j) {
    const double w = std::exp(scores[j] - high);
    sum += w;
    for (int i = 0; i < d; ++i) (*out)[i] += w * values[j * d + i];
  }
  for (double& x : *out) x /= sum;
  *lse = high + std::log(sum);
}

// The bits of out.
inline std::vector<uint8_t> check(const Case& c, const DeviceInfo& device, uint32_t seed) {
  Run r;
  build(c, &r, seed);
  if (!launch(&r, device)) {
    report(c.name, false, "refused");
    return {};
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<uint8_t> out = r.out.download();
  const std::vector<float> lse = r.lse.download();
  const int64_t rows = r.call.total_q * c.num_heads;
  std::vector<double> error(rows), size(rows), lse_error(rows);
  std::vector<int> wrong(rows);
  parallel(rows, [&](int64_t i) {
    std::vector<double> want;
    double want_lse;
    const int head = static_cast<int>(i % c.num_heads);
    const int64_t row = i / c.num_heads;
    reference(c, r, row, head, &want, &want_lse);
    for (int k = 0; k < c.head_dim; ++k) {
      const double got = element(out, c.dtype, i * c.head_dim + k);
      if (std::isfinite(want[k]) != std::isfinite(got)) {
        wrong[i] = 1;
      } else if (std::isfinite(got)) {
        error[i] += (got - want[k]) * (got - want[k]);
        size[i] += want[k] * want[k];
      }
    }
    if (c.lse) {
      const double got = lse[head * r.call.total_q + row];
      if (std::isfinite(want_lse) && std::isfinite(got)) {
        lse_error[i] = std::fabs(got - want_lse) / std::max(1.0, 0.1 * std::fabs(want_lse));
      } else if (std::isnan(want_lse) ? !std::isnan(got) : got != want_lse) {
        wrong[i] = 2;
      }
    }
  });
  const double e = std::sqrt(std::accumulate(error.begin(), error.end(), 0.0) /
                             std::max(1e-300, std::accumulate(size.begin(), size.end(), 0.0)));
  const double le = *std::max_element(lse_error.begin(), lse_error.end());
  int bad = 0;
  for (int w : wrong) bad += w != 0;
  char detail[128];
  std::snprintf(detail, sizeof detail, "rel %.2e lse %.2e bad rows %d of %lld", e, le, bad,
                static_cast<long long>(rows));
  // Scores grow with the queries, and the error of lse with the scores.
  report(c.name, e <= c.tolerance && le <= 2e-3 * std::max(1.0f, c.query_size / 2) && bad == 0,
         detail);
  // The same bits again, with other garbage in the workspace.
  CHECK_CUDA(cudaMemset(r.workspace.data, 0x7b, r.workspace.count));
  launch(&r, device);
  if (r.out.download() != out) report(std::string(c.name) + " again", false, "bits differ");
  return out;
}

inline std::vector<Case> cases() {
  std::vector<Case> list;
  struct Format {
    const char* name;
    KeyCode key;
    ValueCode value;
  };
  static const Format formats[] = {
      {"4bit_nc", KeyCode::kLloydMax4, ValueCode::kUniform4},
      {"k3v4_nc", KeyCode::kLloydMax3, ValueCode::kUniform4},
      {"3bit_nc", KeyCode::kLloydMax3, ValueCode::kUniform3},
      {"k8v4", KeyCode::kFp8E4M3, ValueCode::kUniform4},
      {"k8v4/e4b15", KeyCode::kFp8E4B15, ValueCode::kUniform4},
  };
  static std::vector<std::string> names;
  names.reserve(1000);
  auto add = [&](Case c, const std::string& name) {
    names.push_back(name);
    c.name = names.back().c_str();
    list.push_back(c);
  };
  for (const Format& f : formats) {
    for (int d : {64, 128, 256}) {
      Case c;
      c.key = f.key;
      c.value = f.value;
      c.head_dim = d;
      const std::string base = std::string(f.name) + " d" + std::to_string(d);
      c.num_heads = 8;
      c.num_kv_heads = 2;
      c.seqs = {{777, 1}};
      add(c, base + " q1 rows 4");
      c.query_size = 4.0f;
      c.seqs = {{1500, 3}, {1, 1}, {0, 0}, {33, 2}};
      c.max_q_len = 3;
      add(c, base + " varlen rows 12");
      c.query_size = 1.0f;
      c.max_q_len = 8;
      c.seqs = {{900, 8}, {17, 5}, {5, 5}};
      c.layout = PageLayout::kHeadMajor;
      c.dtype = DType::kBFloat16;
      c.tolerance = 4e-3;
      add(c, base + " verify rows 32 bf16 head-major");
      c.tolerance = 1.5e-3;
      c.dtype = DType::kFloat32;
      c.chunk = true;
      c.num_heads = 12;
      c.max_q_len = 0;
      c.seqs = {{530, 7}, {4, 4}, {129, 1}};
      add(c, base + " raw chunk group 6");
      if (f.key == KeyCode::kLloydMax4 || f.key == KeyCode::kFp8E4M3) {
        c.norm_correction = false;
        c.chunk = false;
        c.layout = PageLayout::kTokenMajor;
        c.num_heads = 14;
        c.block_size = 5;
        c.slot_stride = SlotFormat{d, f.key, f.value, true}.slot_bytes() + 6;
        c.base_offset = 2;
        c.seqs = {{401, 2}, {64, 3}};
        add(c, base + " odd blocks and pitch, base + 2");
      }
    }
  }
  Case c;
  c.seqs = {{3000, 4}, {40, 2}};
  c.window = 100;
  add(c, "window");
  c.first_block = 2;
  c.seqs = {{3000, 4}, {140, 2}};
  c.window = 50;
  add(c, "window, table from block 2");
  c = Case{};
  c.seqs = {{600, 4}, {2, 2}, {2, 3}};
  c.softcap = 5.0f;
  c.query_size = 8.0f;
  add(c, "softcap");
  c.softcap = 0.0f;
  c.sinks = true;
  c.query_size = 1.0f;
  add(c, "sinks");
  c.chunk = true;
  c.softcap = 20.0f;
  add(c, "sinks, softcap, chunk");
  c = Case{};
  c.causal = false;
  c.seqs = {{300, 5}, {2, 3}};
  add(c, "non-causal");
  c.window = 40;
  add(c, "non-causal window");
  c = Case{};
  c.seqs = {{300, 1}, {20, 1}};
  c.scale = -0.3f;
  add(c, "negative scale");
  c.scale = 1e-12f;
  add(c, "tiny scale");
  c = Case{};
  c.seqs = {{200, 3}};
  c.extra_q = 5;
  add(c, "rows of no sequence");
  c = Case{};
  c.num_heads = 40;
  c.num_kv_heads = 1;
  c.seqs = {{200, 2}, {90, 1}};
  add(c, "group 40");
  c.num_heads = 5;
  c.num_kv_heads = 5;
  c.seqs = {{200, 9}, {90, 40}};
  add(c, "group 1, long rows");
  c.seqs.clear();
  c.num_heads = 4;
  c.num_kv_heads = 2;
  for (int i = 0; i < 100; ++i) c.seqs.push_back({37 * i % 301, std::min(37 * i % 301, 1)});
  add(c, "100 sequences");
  c.seqs.clear();
  for (int i = 0; i < 70; ++i) c.seqs.push_back({50 + 3 * i, i % 7});
  add(c, "70 sequences, ragged rows");
  c = Case{};
  c.block_size = 784;
  c.seqs = {{783, 1}, {784, 1}, {785, 2}};
  add(c, "block 784");
  c.block_size = 1;
  add(c, "block 1");
  c = Case{};
  c.dtype = DType::kFloat16;
  c.tolerance = 2e-3;
  c.seqs = {{20000, 2}};
  add(c, "20K tokens fp16");
  c.query_size = 30.0f;
  add(c, "20K tokens peaked fp16");
  // Hostile tables: readers are NaN, nobody else.
  c = Case{};
  c.seqs = {{300, 4}, {100, 2}};
  c.edit = [](Case&, std::vector<uint8_t>&, std::vector<int32_t>& table) {
    table[3] = -1;
    table[19] = 0x70000000;
  };
  add(c, "hostile entry, first sequence");
  c.window = 30;
  add(c, "hostile entry behind the window");
  c.window = 0;
  c.edit = [](Case& k, std::vector<uint8_t>&, std::vector<int32_t>&) { k.seqs[0].seq_len = 300; };
  add(c, "plain after edit");
  // Eight rows or fewer of pages that hold all heads together.
  c = Case{};
  c.num_heads = 4;
  c.max_q_len = 4;
  c.layout = PageLayout::kHeadMajor;
  c.block_size = 32;
  c.chunk = true;
  c.seqs = {{530, 3}, {2, 2}, {129, 1}, {700, 4}};
  add(c, "few rows, head-major pages of 32, chunk");
  c.chunk = false;
  c.window = 200;
  c.softcap = 20.0f;
  c.sinks = true;
  add(c, "few rows, window, cap and sinks");
  c.layout = PageLayout::kTokenMajor;
  c.block_size = 16;
  c.slot_stride = 144;
  add(c, "few rows, padded slots");
  c = Case{};
  c.num_heads = 5;
  c.num_kv_heads = 5;
  c.seqs = {{1500, 3}, {90, 8}};
  c.max_q_len = 8;
  add(c, "few rows, five heads");
  c.num_kv_heads = 1;
  c.max_q_len = 1;
  c.seqs = {{3000, 1}, {90, 1}};
  add(c, "few rows, one head");
  c = Case{};
  c.max_q_len = 2;
  c.seqs = {{300, 2}, {100, 2}};
  c.edit = [](Case&, std::vector<uint8_t>&, std::vector<int32_t>& table) {
    table[3] = -1;
    table[19] = 0x70000000;
  };
  add(c, "few rows, hostile entries");
  c.window = 30;
  add(c, "few rows, hostile entries behind the window");
  return list;
}

}  // namespace rows_test
}  // namespace kvtile
