// Checks and times the tile engine on the current GPU, without the rest of the library: every case
// is compared with the float64 oracle on sampled rows before anything is timed. Usage:
//   tile_check [hopper] [check] [bench] [json FILE]
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvtile/attention.h"
#include "src/attention/cuda/sm80/tile.h"
#include "src/attention/reference.h"
#include "src/core/half2.h"

namespace {

using kvtile::AttentionCall;
using kvtile::DType;

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK_CUDA(expr) check_cuda((expr), #expr)

struct Rng {
  uint64_t state;
  explicit Rng(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t next() {
    state += 0x9e3779b97f4a7c15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  float normal() {
    const double a = std::sqrt(-2.0 * std::log(1.0 - uniform())), b = 6.283185307179586 * uniform();
    return static_cast<float>(a * std::cos(b));
  }
};

uint16_t to_half(float x) { return kvtile::float_to_half_bits(x); }
uint16_t to_bf16(float x) {
  const uint32_t bits = kvtile::float_bits(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float load(const std::vector<std::byte>& data, DType dtype, size_t index) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, data.data() + 4 * index, 4);
    return x;
  }
  uint16_t word;
  std::memcpy(&word, data.data() + 2 * index, 2);
  return dtype == DType::kFloat16 ? kvtile::half_to_float(word)
                                  : kvtile::bits_float(static_cast<uint32_t>(word) << 16);
}
void store(std::vector<std::byte>* data, DType dtype, size_t index, float x) {
  if (dtype == DType::kFloat32) {
    std::memcpy(data->data() + 4 * index, &x, 4);
  } else {
    const uint16_t word = dtype == DType::kFloat16 ? to_half(x) : to_bf16(x);
    std::memcpy(data->data() + 2 * index, &word, 2);
  }
}

template <typename T>
struct DeviceBuffer {
  T* data = nullptr;
  size_t count = 0;
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t n) : count(n) {
    if (n > 0) CHECK_CUDA(cudaMalloc(&data, n * sizeof(T)));
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(DeviceBuffer&& other) {
    std::swap(data, other.data);
    std::swap(count, other.count);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(data); }
  void upload(const void* host) {
    if (count > 0) CHECK_CUDA(cudaMemcpy(data, host, count * sizeof(T), cudaMemcpyHostToDevice));
  }
  void fill(int byte) {
    if (count > 0) CHECK_CUDA(cudaMemset(data, byte, count * sizeof(T)));
  }
};

struct Case {
  std::string name;
  std::string preset = "4bit_nc";
  kvtile::KeyCode fp8 = kvtile::KeyCode::kFp8E4M3;
  int head_dim = 128, num_kv_heads = 2, group = 4, block_size = 16;
  std::vector<int> q_lens = {100}, seq_lens = {1100};
  DType dtype = DType::kBFloat16;
  bool raw = true, causal = true, sinks = false;
  int64_t window = 0;
  float softcap = 0.0f, query_gain = 1.0f, softmax_scale = 0.0f;
  int64_t tile_tokens = 0;
  int padding = 0;     // rows past the last sequence
  int non_finite = 0;  // plant non-finite words in visible slots
  bool head_major = false;
  int seed = 1;
};

// A batch in host memory and its copy on the device.
struct Batch {
  Case spec;
  AttentionCall host, device;
  std::vector<std::byte> pages, query, chunk_key, chunk_value, out;
  std::vector<int32_t> table, cu_seqlens, seq_lens;
  std::vector<float> sinks, lse;
  DeviceBuffer<std::byte> d_pages, d_query, d_chunk_key, d_chunk_value, d_out, d_workspace;
  DeviceBuffer<int32_t> d_table, d_cu_seqlens, d_seq_lens;
  DeviceBuffer<float> d_sinks, d_lse;
};

bool g_hopper = false;
int g_num_sms = 0, g_shared_bytes = 0, g_arch = 0;
cudaStream_t g_stream = nullptr;  // launches overlap on a stream of one's own

void fill_slot(const kvtile::SlotFormat& format, Rng* rng, std::byte* slot) {
  for (int i = 0; i < format.slot_bytes(); i += 8) {
    const uint64_t word = rng->next();
    std::memcpy(slot + i, &word, static_cast<size_t>(std::min(8, format.slot_bytes() - i)));
  }
  const auto put = [slot](int offset, float x) {
    const uint16_t word = to_half(x);
    std::memcpy(slot + offset, &word, 2);
  };
  if (format.rotated()) {
    put(format.norm_offset(),
        static_cast<float>((0.7 + 0.6 * rng->uniform()) * std::sqrt(format.head_dim)));
  } else {
    for (int d = 0; d < format.head_dim; ++d) {
      // Random finite bytes of magnitude at most about 2.
      auto byte = std::to_integer<uint8_t>(slot[d]);
      if (format.key == kvtile::KeyCode::kFp8E4M3) {
        byte = static_cast<uint8_t>((byte & 0x80) | ((byte & 0x7f) % 0x40));
      }
      slot[d] = std::byte{byte};
    }
  }
  put(format.scale_offset(), static_cast<float>(0.1 + 0.2 * rng->uniform()));
  put(format.zero_offset(), static_cast<float>(-2.5 + rng->uniform()));
}

void make_batch(const Case& spec, Batch* batch) {
  Batch& b = *batch;
  b.spec = spec;
  Rng rng(static_cast<uint64_t>(spec.seed));
  kvtile::SlotFormat format;
  (void)kvtile::parse_preset(spec.preset, spec.head_dim, &format, spec.fp8);
  const int num_seqs = static_cast<int>(spec.q_lens.size());
  const int longest = *std::max_element(spec.seq_lens.begin(), spec.seq_lens.end());
  const int64_t max_blocks = std::max(1, (longest + spec.block_size - 1) / spec.block_size) + 1;
  int64_t used = 0;
  for (int len : spec.seq_lens) used += (len + spec.block_size - 1) / spec.block_size;
  const int64_t num_blocks = used + 3;
  const int64_t slots = num_blocks * spec.block_size * spec.num_kv_heads;
  b.pages.resize(static_cast<size_t>(slots * format.slot_bytes()));
  const int workers = 16;
  std::vector<std::thread> threads;
  for (int w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      Rng own(static_cast<uint64_t>(spec.seed * 100 + w + 7));
      for (int64_t s = w; s < slots; s += workers) {
        fill_slot(format, &own, b.pages.data() + s * format.slot_bytes());
      }
    });
  }
  for (auto& t : threads) t.join();
  std::vector<int32_t> order(static_cast<size_t>(num_blocks));
  for (int64_t i = 0; i < num_blocks; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.next() % i]);
  b.table.assign(static_cast<size_t>(num_seqs * max_blocks), 0x7fffffff);
  size_t next = 0;
  b.cu_seqlens = {0};
  for (int s = 0; s < num_seqs; ++s) {
    const int blocks =
        (spec.seq_lens[static_cast<size_t>(s)] + spec.block_size - 1) / spec.block_size;
    for (int i = 0; i < blocks; ++i) {
      b.table[static_cast<size_t>(s * max_blocks + i)] = order[next++];
    }
    b.cu_seqlens.push_back(b.cu_seqlens.back() + spec.q_lens[static_cast<size_t>(s)]);
  }
  b.seq_lens.assign(spec.seq_lens.begin(), spec.seq_lens.end());
  const int64_t total_q = b.cu_seqlens.back() + spec.padding;
  const int num_heads = spec.num_kv_heads * spec.group;
  const auto element = static_cast<size_t>(kvtile::dtype_bytes(spec.dtype));
  const auto random = [&](std::vector<std::byte>* data, size_t count, float gain) {
    data->resize(count * element);
    for (size_t i = 0; i < count; ++i) {
      store(data, spec.dtype, i,
            kvtile::bits_float(static_cast<uint32_t>(to_bf16(gain * rng.normal())) << 16));
    }
  };
  random(&b.query, static_cast<size_t>(total_q * num_heads * spec.head_dim), spec.query_gain);
  random(&b.chunk_key, static_cast<size_t>(total_q * spec.num_kv_heads * spec.head_dim), 1.0f);
  random(&b.chunk_value, static_cast<size_t>(total_q * spec.num_kv_heads * spec.head_dim), 1.0f);
  for (int h = 0; h < num_heads; ++h) b.sinks.push_back(rng.normal() * 2.0f);

  AttentionCall& call = b.host;
  call.dtype = spec.dtype;
  call.num_seqs = num_seqs;
  call.total_q = total_q;
  call.num_heads = num_heads;
  call.softmax_scale = spec.softmax_scale != 0.0f
                           ? spec.softmax_scale
                           : 1.0f / std::sqrt(static_cast<float>(spec.head_dim));
  call.softcap = spec.softcap;
  call.mask.causal = spec.causal;
  call.mask.window = spec.window;
  call.cache = kvtile::make_cache(
      b.pages.data(), num_blocks, spec.block_size, spec.num_kv_heads, format,
      spec.head_major ? kvtile::PageLayout::kHeadMajor : kvtile::PageLayout::kTokenMajor);
  call.max_blocks = max_blocks;
  call.tile_tokens = spec.tile_tokens;
  call.query = b.query.data();
  call.block_table = b.table.data();
  call.cu_seqlens_q = b.cu_seqlens.data();
  call.seq_lens = b.seq_lens.data();
  if (spec.sinks) call.sinks = b.sinks.data();
  if (spec.raw) {
    call.chunk_key = b.chunk_key.data();
    call.chunk_value = b.chunk_value.data();
  }
  for (int i = 0; i < spec.non_finite; ++i) {
    const auto s = static_cast<size_t>(rng.next() % static_cast<uint64_t>(num_seqs));
    if (b.seq_lens[s] == 0) continue;
    const auto token = static_cast<int64_t>(rng.next() % static_cast<uint64_t>(b.seq_lens[s]));
    const auto head = static_cast<int64_t>(rng.next() % static_cast<uint64_t>(spec.num_kv_heads));
    const int64_t page =
        b.table[s * static_cast<size_t>(max_blocks) + static_cast<size_t>(token / spec.block_size)];
    std::byte* slot = b.pages.data() + call.cache.slot_offset(page, token % spec.block_size, head);
    const uint16_t words[3] = {0x7e00, 0x7c00, 0xfc00};
    const int kind = static_cast<int>(rng.next() % 3);
    const int offset = kind == 0 && format.rotated() && i % 4 == 0 ? format.norm_offset()
                       : kind == 1                                 ? format.zero_offset()
                                                                   : format.scale_offset();
    std::memcpy(slot + offset, &words[rng.next() % 3], 2);
  }
  b.out.resize(b.query.size());
  b.lse.resize(static_cast<size_t>(num_heads * total_q));

  b.d_pages = DeviceBuffer<std::byte>(b.pages.size());
  b.d_pages.upload(b.pages.data());
  b.d_query = DeviceBuffer<std::byte>(b.query.size());
  b.d_query.upload(b.query.data());
  b.d_chunk_key = DeviceBuffer<std::byte>(b.chunk_key.size());
  b.d_chunk_key.upload(b.chunk_key.data());
  b.d_chunk_value = DeviceBuffer<std::byte>(b.chunk_value.size());
  b.d_chunk_value.upload(b.chunk_value.data());
  b.d_out = DeviceBuffer<std::byte>(b.out.size());
  b.d_table = DeviceBuffer<int32_t>(b.table.size());
  b.d_table.upload(b.table.data());
  b.d_cu_seqlens = DeviceBuffer<int32_t>(b.cu_seqlens.size());
  b.d_cu_seqlens.upload(b.cu_seqlens.data());
  b.d_seq_lens = DeviceBuffer<int32_t>(b.seq_lens.size());
  b.d_seq_lens.upload(b.seq_lens.data());
  b.d_sinks = DeviceBuffer<float>(b.sinks.size());
  b.d_sinks.upload(b.sinks.data());
  b.d_lse = DeviceBuffer<float>(b.lse.size());
  b.device = call;
  b.device.cache.pages = b.d_pages.data;
  b.device.query = b.d_query.data;
  b.device.out = b.d_out.data;
  b.device.lse = b.d_lse.data;
  b.device.block_table = b.d_table.data;
  b.device.cu_seqlens_q = b.d_cu_seqlens.data;
  b.device.seq_lens = b.d_seq_lens.data;
  if (spec.sinks) b.device.sinks = b.d_sinks.data;
  if (spec.raw) {
    b.device.chunk_key = b.d_chunk_key.data;
    b.device.chunk_value = b.d_chunk_value.data;
  }
}

const kvtile::cuda::TileAttention& attention_of(int head_dim) {
  return g_hopper ? kvtile::cuda::hopper_attention(head_dim)
                  : kvtile::cuda::tile_attention(head_dim, g_shared_bytes);
}

kvtile::cuda::TileParams prepare(Batch* batch, int64_t tile_tokens) {
  batch->device.tile_tokens = tile_tokens;
  kvtile::cuda::TileDevice device;
  device.num_sms = g_num_sms;
  device.overlaps = g_arch >= 90;
  const kvtile::cuda::TilePlan plan = kvtile::cuda::make_tile_plan(
      batch->device, device, attention_of(batch->spec.head_dim).shape);
  if (batch->d_workspace.count < static_cast<size_t>(plan.bytes)) {
    batch->d_workspace = DeviceBuffer<std::byte>(static_cast<size_t>(plan.bytes));
  }
  return kvtile::cuda::make_tile_params(batch->device, plan, batch->d_workspace.data);
}

void run(Batch* batch, int64_t tile_tokens) {
  const auto params = prepare(batch, tile_tokens);
  batch->d_out.fill(0xff);
  batch->d_lse.fill(0xff);
  batch->d_workspace.fill(0xff);
  CHECK_CUDA(kvtile::cuda::run_tile(params, attention_of(params.plan.head_dim), g_shared_bytes, g_stream));
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(
      cudaMemcpy(batch->out.data(), batch->d_out.data, batch->out.size(), cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(batch->lse.data(), batch->d_lse.data, batch->lse.size() * sizeof(float),
                        cudaMemcpyDeviceToHost));
}

struct Errors {
  double out = 0, lse = 0;  // largest relative row error; largest absolute lse error
  double rms = 0;           // relative error over all sampled rows
  int wrong = 0;            // rows whose non-finite pattern, emptiness or padding is wrong
  std::string first;
};

Errors compare(const Batch& batch, int max_samples) {
  const AttentionCall& call = batch.host;
  const int head_dim = batch.spec.head_dim;
  std::vector<std::pair<int64_t, int>> samples;
  const int64_t all = call.total_q * call.num_heads;
  if (all <= max_samples) {
    for (int64_t i = 0; i < all; ++i) {
      samples.emplace_back(i / call.num_heads, static_cast<int>(i % call.num_heads));
    }
  } else {
    Rng rng(99);
    for (int i = 0; i < max_samples; ++i) {
      const int64_t at = i == 0   ? 0
                         : i == 1 ? all - 1
                                  : static_cast<int64_t>(rng.next() % static_cast<uint64_t>(all));
      samples.emplace_back(at / call.num_heads, static_cast<int>(at % call.num_heads));
    }
  }
  std::vector<std::vector<double>> outs(samples.size());
  std::vector<double> lses(samples.size());
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int w = 0; w < 16; ++w) {
    threads.emplace_back([&] {
      for (size_t i = next++; i < samples.size(); i = next++) {
        outs[i].assign(static_cast<size_t>(head_dim), 0.0);
        if (samples[i].first >= call.cu_seqlens_q[call.num_seqs]) {
          lses[i] = -std::numeric_limits<double>::infinity();
        } else {
          kvtile::reference_attend_row(call, samples[i].first, samples[i].second, outs[i].data(),
                                       &lses[i]);
        }
      }
    });
  }
  for (auto& t : threads) t.join();
  Errors errors;
  double all_error = 0, all_norm = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto [row, head] = samples[i];
    const size_t at = static_cast<size_t>((row * call.num_heads + head) * head_dim);
    const double lse = batch.lse[static_cast<size_t>(head * call.total_q + row)];
    double error = 0, norm = 0;
    bool wrong = false;
    for (int d = 0; d < head_dim; ++d) {
      const double got = load(batch.out, call.dtype, at + static_cast<size_t>(d));
      const double want = outs[i][static_cast<size_t>(d)];
      if (std::isfinite(want)) {
        if (!std::isfinite(got)) wrong = true;
        error += (got - want) * (got - want);
        norm += want * want;
      } else if (std::isfinite(got)) {
        wrong = true;
      }
    }
    if (std::isnan(lses[i]) != std::isnan(lse) || std::isinf(lses[i]) != std::isinf(lse)) {
      wrong = true;
    }
    if (norm == 0 && error > 0) wrong = true;
    if (wrong) {
      if (errors.wrong++ == 0) {
        char text[160];
        std::snprintf(text, sizeof(text), "row %lld head %d lse %g want %g out %g want %g",
                      static_cast<long long>(row), head, lse, lses[i],
                      static_cast<double>(load(batch.out, call.dtype, at)), outs[i][0]);
        errors.first = text;
      }
      continue;
    }
    all_error += error;
    all_norm += norm;
    if (norm > 0) errors.out = std::max(errors.out, std::sqrt(error / norm));
    if (std::isfinite(lses[i])) errors.lse = std::max(errors.lse, std::fabs(lse - lses[i]));
  }
  errors.rms = all_norm > 0 ? std::sqrt(all_error / all_norm) : 0;
  return errors;
}

int g_failures = 0, g_checks = 0;

void expect(bool ok, const std::string& name, const std::string& detail) {
  ++g_checks;
  if (!ok) ++g_failures;
  std::printf("%s %-46s %s\n", ok ? "ok  " : "FAIL", name.c_str(), detail.c_str());
  std::fflush(stdout);
}

// A peaked softmax multiplies the rounding of a score by its size.
double tolerance(const Case& spec) {
  return (spec.dtype == DType::kBFloat16 ? 4e-3 : 1.5e-3) * std::max(1.0f, spec.query_gain);
}

void check_case(const Case& spec, int samples = 400) {
  Batch batch;
  make_batch(spec, &batch);
  run(&batch, spec.tile_tokens);
  const Errors e = compare(batch, samples);
  char text[256];
  std::snprintf(text, sizeof(text), "rel %.2e rms %.2e lse %.1e wrong %d %s", e.out, e.rms, e.lse,
                e.wrong, e.first.c_str());
  expect(e.wrong == 0 && e.out < tolerance(spec) && e.lse < 4e-3 * spec.query_gain, spec.name,
         text);

  // Same bits again, and with another tile.
  const auto out = batch.out;
  const auto lse = batch.lse;
  const auto same = [&] {
    return std::memcmp(out.data(), batch.out.data(), out.size()) == 0 &&
           std::memcmp(lse.data(), batch.lse.data(), lse.size() * 4) == 0;
  };
  run(&batch, spec.tile_tokens);
  if (!same()) expect(false, spec.name, "second run differs");
  for (int64_t tile : {8192, 16384, 65536}) {
    run(&batch, tile);
    if (!same()) expect(false, spec.name, "tile " + std::to_string(tile) + " differs");
  }
}

void check_all() {
  const char* presets[] = {"4bit_nc", "k8v4", "k3v4_nc", "3bit_nc"};
  for (int head_dim : {64, 128, 256}) {
    for (const char* preset : presets) {
      Case c;
      c.name = std::string(preset) + " D" + std::to_string(head_dim);
      c.preset = preset;
      c.head_dim = head_dim;
      c.group = head_dim == 256 ? 6 : 4;
      c.dtype = head_dim == 64    ? DType::kFloat16
                : head_dim == 128 ? DType::kFloat32
                                  : DType::kBFloat16;
      c.seed = head_dim;
      check_case(c);
      c.name += " packed";
      c.raw = false;
      c.head_major = true;
      c.block_size = 7;
      check_case(c);
    }
  }
  Case e4b15;
  e4b15.name = "k8v4/e4b15 D128";
  e4b15.preset = "k8v4";
  e4b15.fp8 = kvtile::KeyCode::kFp8E4B15;
  check_case(e4b15);
  for (int head_dim : {128, 256}) {
    Case v;
    v.head_dim = head_dim;
    v.dtype = DType::kFloat32;
    const std::string d = " D" + std::to_string(head_dim);
    v.q_lens = {1, 130, 0, 7, 300, 5};
    v.seq_lens = {500, 130, 10, 3, 9000, 5000};
    v.padding = 9;
    v.name = "varlen" + d;
    check_case(v);
    v.block_size = 784;
    v.raw = false;
    v.name = "varlen packed bs784" + d;
    check_case(v);
    v.block_size = 1;
    v.group = 1;
    v.num_kv_heads = 5;
    v.name = "varlen bs1 group1" + d;
    check_case(v);
    v = Case();
    v.head_dim = head_dim;
    v.dtype = DType::kFloat32;
    v.q_lens = {200, 64};
    v.seq_lens = {3000, 64};
    v.window = 100;
    v.name = "window 100" + d;
    check_case(v);
    v.window = 1;
    v.name = "window 1" + d;
    check_case(v);
    v.window = 2000;
    v.seq_lens = {20000, 64};
    v.name = "window 2000 of 20000" + d;
    check_case(v);
    v.window = 0;
    v.causal = false;
    v.name = "non-causal" + d;
    check_case(v, 200);
    v.window = 777;
    v.name = "non-causal window" + d;
    check_case(v, 200);
    v = Case();
    v.head_dim = head_dim;
    v.dtype = DType::kFloat32;
    v.softcap = 5.0f;
    v.sinks = true;
    v.name = "softcap, sinks" + d;
    check_case(v);
    v.softcap = 0.0f;
    v.query_gain = 8.0f;
    v.name = "peaked, sinks" + d;
    check_case(v);
    v.softmax_scale = -0.05f;
    v.name = "negative scale" + d;
    check_case(v);
    v = Case();
    v.head_dim = head_dim;
    v.dtype = DType::kFloat32;
    v.q_lens = {256};
    v.seq_lens = {40000};
    v.tile_tokens = 8192;
    v.name = "40000 cached" + d;
    check_case(v, 64);
    v.tile_tokens = 0;
    v.q_lens = {2000, 33};
    v.seq_lens = {9000, 30000};
    v.num_kv_heads = 4;
    v.name = "2000 + 33 rows" + d;
    check_case(v, 64);
    v = Case();
    v.head_dim = head_dim;
    v.dtype = DType::kFloat32;
    v.q_lens = {300, 40};
    v.seq_lens = {330, 2000};
    v.non_finite = 6;
    v.raw = false;
    v.name = "non-finite words" + d;
    for (int seed = 1; seed <= 3; ++seed) {
      v.seed = seed;
      check_case(v);
    }
    v.window = 50;
    v.name = "non-finite words, window" + d;
    check_case(v);
  }
}

void check_graph() {
  Case spec;
  spec.q_lens = {60, 40};
  spec.seq_lens = {9000, 3000};
  spec.head_dim = 256;
  spec.group = 6;
  spec.padding = 4;
  Batch batch;
  make_batch(spec, &batch);
  const auto params = prepare(&batch, 8192);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  // Captured with lengths of nothing, replayed with the real ones.
  batch.d_seq_lens.fill(0);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(kvtile::cuda::run_tile(params, attention_of(params.plan.head_dim), g_shared_bytes, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_CUDA(cudaGraphLaunch(exec, stream));
  batch.d_seq_lens.upload(batch.seq_lens.data());
  run(&batch, 8192);
  const auto out = batch.out;
  batch.d_out.fill(0xff);
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaMemcpy(batch.out.data(), batch.d_out.data, out.size(), cudaMemcpyDeviceToHost));
  expect(std::memcmp(out.data(), batch.out.data(), out.size()) == 0, "graph replay", "");
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

std::string g_json;

void bench_case(const std::string& shape, const std::string& preset, int cached, int q_len,
                int64_t tile, int repeats, int samples) {
  static Batch* batch = nullptr;
  static std::string key;
  const std::string wanted = shape + preset + std::to_string(cached) + "/" + std::to_string(q_len);
  if (key != wanted) {
    delete batch;
    batch = new Batch;
    key = wanted;
    Case c;
    c.preset = preset;
    c.head_dim = shape == "A" ? 256 : 128;
    c.num_kv_heads = shape == "A" ? 4 : 8;
    c.group = shape == "A" ? 6 : 4;
    c.q_lens = {q_len};
    c.seq_lens = {cached + q_len};
    make_batch(c, batch);
    batch->device.max_seq_len = cached + q_len;
  }
  Errors e;
  if (samples > 0) {
    run(batch, tile);
    e = compare(*batch, samples);
    if (e.wrong > 0 || e.out > 4e-3) expect(false, wanted, e.first);
  }
  const auto params = prepare(batch, tile);
  std::vector<float> times;
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  for (int i = 0; i < repeats + 1; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, g_stream));
    CHECK_CUDA(kvtile::cuda::run_tile(params, attention_of(params.plan.head_dim), g_shared_bytes, g_stream));
    CHECK_CUDA(cudaEventRecord(end, g_stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i > 0 || repeats == 0) times.push_back(ms);
  }
  const auto host_begin = std::chrono::steady_clock::now();
  CHECK_CUDA(kvtile::cuda::run_tile(params, attention_of(params.plan.head_dim), g_shared_bytes, g_stream));
  const double host_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - host_begin)
          .count();
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK_CUDA(cudaStreamBeginCapture(g_stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(kvtile::cuda::run_tile(params, attention_of(params.plan.head_dim), g_shared_bytes, g_stream));
  CHECK_CUDA(cudaStreamEndCapture(g_stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> replays;
  for (int i = 0; i < repeats + 1; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, g_stream));
    CHECK_CUDA(cudaGraphLaunch(replay, g_stream));
    CHECK_CUDA(cudaEventRecord(end, g_stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i > 0 || repeats == 0) replays.push_back(ms);
  }
  std::sort(replays.begin(), replays.end());
  CHECK_CUDA(cudaGraphExecDestroy(replay));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2];
  const Case& c = batch->spec;
  // Pairs a causal chunk really sees; ns/qtl is per query token x cached token.
  const double pairs = static_cast<double>(q_len) * cached + 0.5 * q_len * (q_len + 1.0);
  const double flop = 4.0 * c.head_dim * c.num_kv_heads * c.group * pairs;
  const double qtl = ms * 1e6 / (static_cast<double>(q_len) * cached);
  char text[512];
  std::snprintf(
      text, sizeof(text),
      "{\"shape\": \"%s\", \"preset\": \"%s\", \"cached\": %d, \"q_len\": %d, \"tile\": %lld, "
      "\"ms\": %.4f, \"ms_min\": %.4f, \"ms_max\": %.4f, "
      "\"replay_ms\": %.4f, \"host_ms\": %.4f, \"ns_per_qtl\": %.5f, "
      "\"tflops\": %.1f, \"scratch_mib\": %.1f, \"rel_error\": %.2e}",
      shape.c_str(), preset.c_str(), cached, q_len, static_cast<long long>(params.plan.tile_tokens),
      ms, static_cast<double>(times.front()), static_cast<double>(times.back()),
      static_cast<double>(replays[replays.size() / 2]), host_ms, qtl, flop / ms * 1e-9,
      static_cast<double>(params.plan.bytes) / (1 << 20), e.rms);
  std::printf("%s\n", text);
  std::fflush(stdout);
  g_json += (g_json.empty() ? "" : ",\n") + std::string(text);
}

// Times of the parts of one step, by launching them alone.
void bench_parts(const std::string& shape, const std::string& preset, int cached, int q_len) {
  Batch batch;
  Case c;
  c.preset = preset;
  c.head_dim = shape == "A" ? 256 : 128;
  c.num_kv_heads = shape == "A" ? 4 : 8;
  c.group = shape == "A" ? 6 : 4;
  c.q_lens = {q_len};
  c.seq_lens = {cached + q_len};
  make_batch(c, &batch);
  run(&batch, 0);
  const auto params = prepare(&batch, 0);
  const auto time = [&](const std::function<void()>& f) {
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    f();
    CHECK_CUDA(cudaEventRecord(begin, g_stream));
    for (int i = 0; i < 10; ++i) f();
    CHECK_CUDA(cudaEventRecord(end, g_stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms / 10;
  };
  const float rotate = time([&] { CHECK_CUDA(kvtile::cuda::launch_tile_rotate(params, {}, g_stream)); });
  const float image =
      time([&] { CHECK_CUDA(kvtile::cuda::launch_tile_fill(params, {}, false, g_stream)); });
  const float attention = time([&] {
    CHECK_CUDA(attention_of(c.head_dim).launch(params, {0, 0, 1, 0}, g_shared_bytes, false, g_stream));
  });
  const float merge = time([&] { CHECK_CUDA(kvtile::cuda::launch_tile_merge(params, {}, g_stream)); });
  const double tokens = static_cast<double>(std::min<int64_t>(params.plan.tile_tokens, cached)) *
                        params.plan.contexts;
  std::printf(
      "parts %s %s q %d: contexts %d row_blocks %d chunks %d steps %d tile %lld | rotate %.4f ms, "
      "image %.4f ms (%.4f ns/token-head), attention on %d SMs %.4f ms, merge %.4f ms\n",
      shape.c_str(), preset.c_str(), q_len, params.plan.contexts, params.plan.row_blocks,
      params.plan.row_chunks, params.plan.num_steps,
      static_cast<long long>(params.plan.tile_tokens), rotate, image, image * 1e6 / tokens,
      params.plan.num_ctas, attention, merge);
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp prop;
  CHECK_CUDA(cudaGetDeviceProperties(&prop, 0));
  g_num_sms = prop.multiProcessorCount;
  CHECK_CUDA(cudaStreamCreate(&g_stream));
  g_arch = 10 * prop.major + prop.minor;
  g_shared_bytes = static_cast<int>(prop.sharedMemPerBlockOptin);
  std::printf("%s, %d SMs, %d bytes shared\n", prop.name, g_num_sms, g_shared_bytes);
  const auto asked = [&](const char* word) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], word) == 0) return true;
    }
    return false;
  };
  g_hopper = asked("hopper");
  if (asked("check")) {
    check_all();
    check_graph();
    std::printf("%d checks, %d failures\n", g_checks, g_failures);
  }
  if (asked("quick")) {
    bench_parts("A", "4bit_nc", 131072, 1024);
    bench_parts("B", "4bit_nc", 131072, 1024);
    for (const char* shape : {"A", "B"}) {
      for (int q_len : {1024, 8192}) bench_case(shape, "4bit_nc", 131072, q_len, 0, 5, 16);
    }
  }
  if (asked("profile") || asked("parts")) {
    bench_parts("A", "4bit_nc", 65536, 1024);
    bench_parts("B", "4bit_nc", 65536, 1024);
  }
  for (const char* shape : {"A", "B"}) {
    if (asked((std::string("profile") + shape).c_str())) {
      bench_parts(shape, "4bit_nc", 65536, 1024);
    }
  }
  if (asked("bench")) {
    for (const char* shape : {"A", "B"}) {
      for (int q_len : {64, 256, 512, 1024, 2048, 8192}) {
        bench_case(shape, "4bit_nc", 131072, q_len, 0, 5, 16);
      }
      bench_case(shape, "k8v4", 131072, 1024, 0, 5, 16);
      bench_case(shape, "3bit_nc", 131072, 1024, 0, 5, 16);
      for (int tile : {8192, 16384, 32768, 65536, 131072}) {
        bench_case(shape, "4bit_nc", 131072, 1024, tile, 5, 0);
      }
      bench_case(shape, "4bit_nc", 1009664, 1024, 0, 3, 16);
      for (int tile : {8192, 32768, 131072})
        bench_case(shape, "4bit_nc", 1009664, 1024, tile, 3, 0);
      bench_case(shape, "4bit_nc", 1009664, 8192, 0, 2, 0);
    }
  }
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "json") == 0) {
      if (std::FILE* file = std::fopen(argv[i + 1], "w")) {
        std::fprintf(file, "[\n%s\n]\n", g_json.c_str());
        std::fclose(file);
      }
    }
  }
  return g_failures == 0 ? 0 : 1;
}
