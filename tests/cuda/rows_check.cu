// The rows backend on a GPU: cases, graph replay, accuracy over a million tokens, then timings as
// JSON. Usage: rows_check [--only NAME] [--no-bench] [--bench FILE] [--quick] [--shape
// NAME/PRESET].
#include "tests/cuda/rows_cases.h"

namespace kvtile {
namespace rows_test {

__global__ void fill_pool(std::byte* pages, int64_t slots, SlotBytes f, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < slots * f.bytes;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t slot = i / f.bytes;
    pages[i] = static_cast<std::byte>(slot_byte(f, slot + seed, static_cast<int>(i % f.bytes)));
  }
}

// Bit-for-bit replay of a captured call after every input changed.
void check_graph(const DeviceInfo& device) {
  Case c;
  c.name = "graph";
  c.seqs = {{1, 1}, {1, 1}, {1, 1}};
  c.max_q_len = 2;
  c.extra_q = 3;
  Run capture, eager;
  build(c, &capture, 5);
  c.seqs = {{500, 2}, {300, 1}, {0, 0}};
  build(c, &eager, 6);
  launch(&eager, device);
  const std::vector<uint8_t> want = eager.out.download();
  // One set of addresses for both: the eager run's.
  size_t bytes = 0;
  (void)cuda::cuda_rows_workspace_bytes(eager.call, device, &bytes);
  std::vector<int32_t> dummy(3, 1), cu = {0, 1, 2, 3};
  const std::vector<int32_t> lens = eager.lens.download(), real_cu = eager.cu.download();
  const std::vector<int32_t> table = eager.table.download();
  CHECK_CUDA(cudaMemcpy(eager.lens.data, dummy.data(), 12, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(eager.cu.data, cu.data(), 16, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemset(eager.table.data, 0, table.size() * 4));
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  launch(&eager, device, stream);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaMemcpy(eager.lens.data, lens.data(), 12, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(eager.cu.data, real_cu.data(), 16, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(eager.table.data, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemset(eager.out.data, 0xff, eager.out.count));
  CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  report("graph replay after change", eager.out.download() == want, "");
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

// Equal scores over a long context: the output is the mean of the values, and the error must not
// grow with the length.
void check_flat(const DeviceInfo& device, const char* preset, int head_dim, bool positive) {
  SlotFormat format;
  if (!parse_preset(preset, head_dim, &format).ok()) std::exit(1);
  SlotBytes bytes_of = slot_bytes_of(format);
  bytes_of.positive = positive;
  const Codebook book = format.rotated() ? make_codebook(format.key, head_dim) : Codebook{};
  for (int64_t tokens : {int64_t{16384}, int64_t{131072}, int64_t{1048576}}) {
    const int64_t blocks = tokens / 16 + 1;
    DeviceArray<uint8_t> pool(blocks * 16 * format.slot_bytes());
    fill_pool<<<2048, 256>>>(reinterpret_cast<std::byte*>(pool.data), blocks * 16, bytes_of, 7);
    std::vector<int32_t> table(blocks);
    std::iota(table.begin(), table.end(), 0);
    DeviceArray<int32_t> d_table, d_cu, d_lens;
    d_table.upload(table);
    d_cu.upload(std::vector<int32_t>{0, 1});
    d_lens.upload(std::vector<int32_t>{static_cast<int32_t>(tokens)});
    DeviceArray<float> query(4 * head_dim), out(4 * head_dim);
    CHECK_CUDA(cudaMemset(query.data, 0, 4 * head_dim * sizeof(float)));
    AttentionCall call;
    call.query = query.data;
    call.out = out.data;
    call.dtype = DType::kFloat32;
    call.num_seqs = 1;
    call.total_q = 1;
    call.num_heads = 4;
    call.softmax_scale = 1.0f;
    call.cache = make_cache(reinterpret_cast<std::byte*>(pool.data), blocks, 16, 1, format);
    call.block_table = d_table.data;
    call.max_blocks = blocks;
    call.cu_seqlens_q = d_cu.data;
    call.seq_lens = d_lens.data;
    size_t bytes = 0;
    if (!cuda::cuda_rows_workspace_bytes(call, device, &bytes).ok()) std::exit(1);
    DeviceArray<uint8_t> workspace(bytes);
    if (!cuda::cuda_rows_run(call, {workspace.data, bytes}, device, nullptr).ok()) std::exit(1);
    const std::vector<float> got = out.download();
    constexpr int kParts = 64;
    std::vector<std::vector<double>> sums(kParts, std::vector<double>(head_dim));
    parallel(kParts, [&](int64_t part) {
      std::vector<double> key(head_dim), value(head_dim);
      std::vector<uint8_t> slot(format.slot_bytes());
      for (int64_t t = part * tokens / kParts; t < (part + 1) * tokens / kParts; ++t) {
        for (int b = 0; b < format.slot_bytes(); ++b) slot[b] = slot_byte(bytes_of, t + 7, b);
        decode(format, book, slot.data(), key.data(), value.data());
        for (int d = 0; d < head_dim; ++d) sums[part][d] += value[d];
      }
    });
    double error = 0.0, size = 0.0;
    for (int d = 0; d < head_dim; ++d) {
      double want = 0.0;
      for (const auto& sum : sums) want += sum[d] / static_cast<double>(tokens);
      for (int h = 0; h < 4; ++h)
        error += (got[h * head_dim + d] - want) * (got[h * head_dim + d] - want);
      size += 4 * want * want;
    }
    const double e = std::sqrt(error / size);
    char detail[96];
    std::snprintf(detail, sizeof detail, "%7lld tokens rel %.2e", static_cast<long long>(tokens),
                  e);
    report(std::string("flat ") + preset + (positive ? " positive" : " centred"), e < 1.5e-3,
           detail);
  }
}

struct Shape {
  const char* name;
  const char* preset;
  int head_dim, num_heads, num_kv_heads, batch, q_len;
  int64_t cached;
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

double copy_rate(double* spread) {
  const size_t bytes = size_t{2} << 30;
  DeviceArray<uint8_t> a(bytes), b(bytes);
  CHECK_CUDA(cudaMemset(a.data, 1, bytes));
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  std::vector<double> rates;
  for (int i = 0; i < 9; ++i) {
    CHECK_CUDA(cudaEventRecord(start));
    CHECK_CUDA(cudaMemcpyAsync(b.data, a.data, bytes, cudaMemcpyDeviceToDevice));
    CHECK_CUDA(cudaEventRecord(stop));
    CHECK_CUDA(cudaEventSynchronize(stop));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) rates.push_back(2.0 * bytes / ms * 1e-6);
  }
  *spread =
      *std::max_element(rates.begin(), rates.end()) - *std::min_element(rates.begin(), rates.end());
  return median(rates);
}

void bench(const DeviceInfo& device, const char* path, bool quick, const std::string& only) {
  double spread = 0.0;
  const double copy = copy_rate(&spread);
  std::printf("copy %.0f GB/s (spread %.0f)\n", copy, spread);
  std::FILE* json = path != nullptr ? std::fopen(path, "w") : nullptr;
  if (json != nullptr) {
    std::fprintf(json, "{\"device\": \"%s\", \"copy_gb_per_s\": %.1f, \"rows\": [\n",
                 device.name.c_str(), copy);
  }
  std::vector<Shape> shapes;
  for (const char* preset : {"4bit_nc", "k8v4", "3bit_nc", "k3v4_nc"}) {
    for (int64_t cached : {int64_t{131072}, int64_t{1009664}}) {
      if (quick && cached > 200000) continue;
      shapes.push_back({"A", preset, 256, 24, 4, 1, 1, cached});
      shapes.push_back({"B", preset, 128, 32, 8, 1, 1, cached});
      shapes.push_back({"A verify", preset, 256, 24, 4, 1, 5, cached});
      shapes.push_back({"B verify", preset, 128, 32, 8, 1, 8, cached});
    }
    shapes.push_back({"A 16x32K", preset, 256, 24, 4, 16, 1, 32768});
    shapes.push_back({"B 16x32K", preset, 128, 32, 8, 16, 1, 32768});
    shapes.push_back({"A 128x4K", preset, 256, 24, 4, 128, 1, 4096});
    shapes.push_back({"B 128x4K", preset, 128, 32, 8, 128, 1, 4096});
  }
  shapes.push_back({"A verify 2", "4bit_nc", 256, 24, 4, 1, 2, 131072});
  shapes.push_back({"B verify 4", "4bit_nc", 128, 32, 8, 1, 4, 131072});
  shapes.push_back({"C d64", "4bit_nc", 64, 32, 8, 1, 1, 131072});
  bool first = true;
  for (const Shape& s : shapes) {
    if (!only.empty() && only != std::string(s.name) + "/" + s.preset) continue;
    SlotFormat format;
    if (!parse_preset(s.preset, s.head_dim, &format).ok()) std::exit(1);
    const int block_size = 16;
    const int64_t seq = s.cached + s.q_len;
    const int64_t per_seq = (seq + block_size - 1) / block_size;
    const int64_t blocks = per_seq * s.batch;
    const int64_t pool_bytes = blocks * block_size * s.num_kv_heads * format.slot_bytes();
    const int copies = pool_bytes > (int64_t{400} << 20) ? 2 : 4;
    std::vector<DeviceArray<uint8_t>> pools(copies);
    for (int i = 0; i < copies; ++i) {
      pools[i].resize(pool_bytes);
      fill_pool<<<2048, 256>>>(reinterpret_cast<std::byte*>(pools[i].data),
                               blocks * block_size * s.num_kv_heads, slot_bytes_of(format),
                               static_cast<uint64_t>(i) << 40);
    }
    CHECK_CUDA(cudaGetLastError());
    // Every sequence's pages in one shuffled order.
    std::vector<int32_t> table(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::mt19937 random(1);
    std::shuffle(table.begin(), table.end(), random);
    DeviceArray<int32_t> d_table, d_cu, d_lens;
    d_table.upload(table);
    std::vector<int32_t> cu, lens(s.batch, static_cast<int32_t>(seq));
    for (int i = 0; i <= s.batch; ++i) cu.push_back(i * s.q_len);
    d_cu.upload(cu);
    d_lens.upload(lens);
    const int64_t total_q = int64_t{s.batch} * s.q_len;
    std::vector<uint8_t> query;
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < total_q * s.num_heads * s.head_dim; ++i) {
      append(&query, DType::kBFloat16, normal(random));
    }
    DeviceArray<uint8_t> d_query, d_out(query.size());
    d_query.upload(query);
    DeviceArray<float> d_lse(total_q * s.num_heads);

    AttentionCall call;
    call.query = d_query.data;
    call.out = d_out.data;
    call.lse = d_lse.data;
    call.num_seqs = s.batch;
    call.total_q = total_q;
    call.num_heads = s.num_heads;
    call.softmax_scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    call.cache = make_cache(reinterpret_cast<std::byte*>(pools[0].data), blocks, block_size,
                            s.num_kv_heads, format);
    call.block_table = d_table.data;
    call.max_blocks = per_seq;
    call.cu_seqlens_q = d_cu.data;
    call.seq_lens = d_lens.data;
    call.max_q_len = s.q_len;
    size_t bytes = 0;
    if (!cuda::cuda_rows_workspace_bytes(call, device, &bytes).ok()) std::exit(1);
    DeviceArray<uint8_t> workspace(bytes);

    cudaEvent_t start, stop;
    CHECK_CUDA(cudaEventCreate(&start));
    CHECK_CUDA(cudaEventCreate(&stop));
    std::vector<double> times;
    const int reps = 9, inner = 8;
    for (int i = 0; i < reps + 2; ++i) {
      CHECK_CUDA(cudaEventRecord(start));
      for (int k = 0; k < inner; ++k) {
        call.cache.pages = reinterpret_cast<std::byte*>(pools[k % copies].data);
        const Status status = cuda::cuda_rows_run(call, {workspace.data, bytes}, device, nullptr);
        if (!status.ok()) {
          std::printf("FAIL %s\n", status.message().c_str());
          std::exit(1);
        }
      }
      CHECK_CUDA(cudaEventRecord(stop));
      CHECK_CUDA(cudaEventSynchronize(stop));
      float ms;
      CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 2) times.push_back(ms / inner);
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    const double ms = median(times);
    const double spread_ms = *std::max_element(times.begin(), times.end()) -
                             *std::min_element(times.begin(), times.end());
    const double packed = static_cast<double>(seq) * s.batch * s.num_kv_heads * format.slot_bytes();
    const double floor_ms = packed / copy * 1e-6;
    std::printf("%-10s %-8s cached %8lld q %d: %.4f ms (+-%.4f) floor %.4f = %.1f %%  ws %.1f MB\n",
                s.name, s.preset, static_cast<long long>(s.cached), s.q_len, ms, spread_ms,
                floor_ms, 100 * floor_ms / ms, bytes * 1e-6);
    if (json != nullptr) {
      std::fprintf(json,
                   "%s{\"shape\": \"%s\", \"preset\": \"%s\", \"cached_len\": %lld, \"q_len\": %d, "
                   "\"batch\": %d, \"ms\": %.5f, \"spread_ms\": %.5f, \"floor_ms\": %.5f, "
                   "\"share_of_floor\": %.4f, \"workspace_bytes\": %zu}",
                   first ? "" : ",\n", s.name, s.preset, static_cast<long long>(s.cached), s.q_len,
                   s.batch, ms, spread_ms, floor_ms, floor_ms / ms, bytes);
      first = false;
    }
    CHECK_CUDA(cudaEventDestroy(start));
    CHECK_CUDA(cudaEventDestroy(stop));
  }
  if (json != nullptr) {
    std::fprintf(json, "\n]}\n");
    std::fclose(json);
  }
}

}  // namespace rows_test
}  // namespace kvtile

int main(int argc, char** argv) {
  using namespace kvtile;
  using namespace kvtile::rows_test;
  const char* path = nullptr;
  bool quick = false, no_bench = false;
  std::string only, only_shape;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--bench") == 0 && i + 1 < argc) path = argv[++i];
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--no-bench") == 0) no_bench = true;
    if (std::strcmp(argv[i], "--shape") == 0 && i + 1 < argc) only_shape = argv[++i];
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
  }
  const DeviceInfo* device = nullptr;
  const Status status = device_info(-1, &device);
  if (!status.ok()) {
    std::printf("%s\n", status.message().c_str());
    return 2;
  }
  std::printf("%s, %d SMs, %d bytes shared a block\n", device->name.c_str(), device->num_sms,
              device->shared_bytes_per_block);
  uint32_t seed = 1;
  for (const Case& c : cases()) {
    if (std::string(c.name).find(only) != std::string::npos) check(c, *device, seed);
    ++seed;
  }
  if (only.empty()) {
    check_graph(*device);
    for (bool positive : {true, false}) {
      check_flat(*device, "4bit_nc", 128, positive);
      check_flat(*device, "3bit_nc", 128, positive);
    }
  }
  std::printf("%d failures\n", failures);
  if (!no_bench) bench(*device, path, quick, only_shape);
  return failures == 0 ? 0 : 1;
}
