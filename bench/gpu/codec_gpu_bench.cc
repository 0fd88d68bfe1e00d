// Encode, decode_slots and tile image on a GPU, as a share of a device-to-device copy of the same
// run. Inputs and outputs rotate through several buffers so that nothing is read back from L2;
// launches are captured in one graph, so that the host is not part of the time. Writes JSON to the
// file named by the first argument, a table to standard output; a second argument limits the run to
// one token count.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kvtile/codec.h"
#include "src/attention/cuda/tile_image.h"
#include "src/core/device.h"

namespace kvtile {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

struct Buffer {
  explicit Buffer(size_t bytes) : bytes(bytes) { check(cudaMalloc(&data, bytes), "cudaMalloc"); }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  template <typename T = std::byte>
  T* as() const {
    return static_cast<T*>(data);
  }
  void upload(const void* host, size_t at, size_t count) const {
    check(cudaMemcpy(as() + at, host, count, cudaMemcpyHostToDevice), "upload");
  }
  void* data = nullptr;
  size_t bytes;
};

// Random bytes everywhere; as bf16 masked to moderate magnitudes.
void fill_random(const Buffer& buffer, bool as_bfloat16) {
  std::vector<uint32_t> block(size_t{1} << 20);
  uint64_t state = 88172645463325252ull;
  for (uint32_t& word : block) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    word = static_cast<uint32_t>(state >> 16);
    // Exponents 120..127: normal numbers between 2^-7 and 2.
    if (as_bfloat16) word = (word & 0x83ff83ffu) | 0x3c003c00u;
  }
  for (size_t at = 0; at < buffer.bytes; at += block.size() * 4) {
    buffer.upload(block.data(), at, std::min(block.size() * 4, buffer.bytes - at));
  }
}

// Seconds of one call of body(i), i = 0, 1, ... rotating: median over replays of a graph of
// `calls` of them.
double seconds_per_call(int calls, const std::function<void(int, cudaStream_t)>& body) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < calls; ++i) body(i, stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&stop), "event");
  std::vector<double> seconds;
  for (int i = 0; i < 30; ++i) {
    check(cudaEventRecord(start, stream), "record");
    check(cudaGraphLaunch(replay, stream), "launch");
    check(cudaEventRecord(stop, stream), "record");
    check(cudaStreamSynchronize(stream), "run");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
    if (i >= 10) seconds.push_back(milliseconds * 1e-3 / calls);  // the first ones warm up
  }
  std::sort(seconds.begin(), seconds.end());
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaStreamDestroy(stream);
  return seconds[seconds.size() / 2];
}

// Bytes read plus written a second by a copy that moves `bytes` in all.
double copy_rate(size_t bytes) {
  const size_t room = size_t{1} << 30;
  const Buffer from(bytes / 2 + room), to(bytes / 2 + room);
  fill_random(from, false);
  const int calls = bytes > (size_t{1} << 28) ? 4 : 16;
  const auto copies = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(i) * (bytes / 2) % room & ~size_t{255};
      check(cudaMemcpyAsync(to.as() + at, from.as() + at, bytes / 2, cudaMemcpyDeviceToDevice),
            "copy");
    }
  };
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&stop), "event");
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) {
    copies(1);  // keeps the device busy while the host queues the rest
    check(cudaEventRecord(start), "record");
    copies(calls);
    check(cudaEventRecord(stop), "record");
    check(cudaDeviceSynchronize(), "run");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
    if (i >= 3) seconds.push_back(milliseconds * 1e-3 / calls);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::sort(seconds.begin(), seconds.end());
  return static_cast<double>(bytes) / seconds[seconds.size() / 2];
}

struct Measured {
  std::string name, preset;
  int head_dim;
  int64_t tokens;
  double seconds, bytes;
  double same_size_copy = 0.0;  // bytes a second of a copy of as many bytes
};

class Bench {
 public:
  Bench() {
    check(device_info(-1, &device_));
    copy_rate_ = copy_rate(size_t{4} << 30);
    std::printf("%s: copy %.0f GB/s (read + written)\n", device_->name.c_str(), copy_rate_ * 1e-9);
    std::printf("%-12s %-9s %4s %7s %10s %8s %6s %6s\n", "kernel", "preset", "dim", "tokens", "us",
                "GB/s", "share", "same");
  }

  void run(const char* preset, KeyCode fp8, int head_dim, int64_t tokens) {
    SlotFormat format;
    check(parse_preset(preset, head_dim, &format, fp8));
    constexpr int kHeads = 8;
    const int64_t rows = tokens * kHeads;
    const auto raw_bytes = static_cast<size_t>(rows * head_dim * 2);
    const auto packed_bytes = static_cast<size_t>(rows * format.slot_bytes());
    const double moved = 2.0 * static_cast<double>(raw_bytes) + static_cast<double>(packed_bytes);
    // Three times the L2, and at least two sets.
    const int sets =
        std::max(2, static_cast<int>(3.0 * static_cast<double>(device_->l2_bytes) / moved) + 1);
    const int calls = std::max(sets, 12);
    const auto of_set = [&](int i) { return static_cast<size_t>(i % sets); };

    Buffer keys(raw_bytes * static_cast<size_t>(sets)),
        values(raw_bytes * static_cast<size_t>(sets));
    Buffer images(2 * raw_bytes * static_cast<size_t>(sets));
    Buffer pages(packed_bytes * static_cast<size_t>(sets));
    Buffer slots(static_cast<size_t>(tokens) * 8), table(static_cast<size_t>(tokens) / 16 * 4);
    fill_random(keys, true);
    fill_random(values, true);
    fill_random(pages, false);
    std::vector<int64_t> slot(static_cast<size_t>(tokens));
    std::vector<int32_t> blocks(static_cast<size_t>(tokens) / 16);
    // Pages in a shuffled order, as a running pool has them.
    for (size_t i = 0; i < blocks.size(); ++i) {
      blocks[i] = static_cast<int32_t>(i * 7919 % blocks.size());
    }
    for (size_t t = 0; t < slot.size(); ++t) {
      slot[t] = int64_t{blocks[t / 16]} * 16 + static_cast<int64_t>(t % 16);
    }
    slots.upload(slot.data(), 0, slots.bytes);
    table.upload(blocks.data(), 0, table.bytes);
    const int32_t lengths[3] = {0, 1, static_cast<int32_t>(tokens)};
    Buffer lens(sizeof lengths);
    lens.upload(lengths, 0, sizeof lengths);

    const auto cache_of = [&](size_t set) {
      return make_cache(pages.as() + set * packed_bytes, tokens / 16, 16, kHeads, format);
    };
    report({"encode", format_name(format), head_dim, tokens,
            seconds_per_call(calls,
                             [&](int i, cudaStream_t stream) {
                               EncodeCall call;
                               call.key = keys.as() + of_set(i) * raw_bytes;
                               call.value = values.as() + of_set(i) * raw_bytes;
                               call.num_tokens = tokens;
                               call.slot_mapping = slots.as<int64_t>();
                               call.cache = cache_of(of_set(i));
                               check(encode_slots(call, nullptr, {"cuda", 0, stream}));
                             }),
            moved});
    report({"decode_slots", format_name(format), head_dim, tokens,
            seconds_per_call(calls,
                             [&](int i, cudaStream_t stream) {
                               DecodeCall call;
                               call.cache = cache_of(of_set(i));
                               call.slot_mapping = slots.as<int64_t>();
                               call.num_tokens = tokens;
                               call.key = keys.as() + of_set(i) * raw_bytes;
                               call.value = values.as() + of_set(i) * raw_bytes;
                               call.dtype = DType::kFloat16;
                               check(decode_slots(call, {"cuda", 0, stream}));
                             }),
            moved});
    AttentionCall attention;
    attention.num_heads = kHeads;
    attention.num_seqs = 1;
    attention.total_q = 1;
    attention.block_table = table.as<int32_t>();
    attention.max_blocks = tokens / 16;
    attention.cu_seqlens_q = lens.as<int32_t>();
    attention.seq_lens = lens.as<int32_t>() + 2;
    const auto fill_image = [&](int image, int set, cudaStream_t stream) {
      attention.cache = cache_of(of_set(set));
      cuda::TileImageParams tile;
      tile.image = images.as() + of_set(image) * 2 * raw_bytes;
      tile.stride_head = cuda::image_bytes(tokens, 64, head_dim);
      tile.num_kv_heads = kHeads;
      tile.num_tokens = static_cast<int>(tokens);
      check(cuda::launch_tile_image(format, cuda::make_attention_params(attention), tile, stream));
    };
    report({"tile_image", format_name(format), head_dim, tokens,
            seconds_per_call(calls, [&](int i, cudaStream_t s) { fill_image(i, i, s); }), moved});
    // As the tile engine runs it: one image, rewritten in place.
    report({"image_reused", format_name(format), head_dim, tokens,
            seconds_per_call(calls, [&](int i, cudaStream_t s) { fill_image(0, i, s); }), moved});
  }

  void write_json(const char* path) const {
    std::FILE* file = std::fopen(path, "w");
    if (file == nullptr) {
      std::fprintf(stderr, "cannot write %s\n", path);
      std::exit(1);
    }
    std::fprintf(file, "{\"device\": \"%s\", \"copy_gb_per_s\": %.1f, \"results\": [\n",
                 device_->name.c_str(), copy_rate_ * 1e-9);
    for (size_t i = 0; i < results_.size(); ++i) {
      const Measured& m = results_[i];
      std::fprintf(file,
                   "  {\"kernel\": \"%s\", \"preset\": \"%s\", \"head_dim\": %d, \"tokens\": %lld, "
                   "\"num_kv_heads\": 8, \"us\": %.3f, \"gb_per_s\": %.1f, \"copy_share\": %.4f, "
                   "\"same_size_copy_share\": %.4f}%s\n",
                   m.name.c_str(), m.preset.c_str(), m.head_dim, static_cast<long long>(m.tokens),
                   m.seconds * 1e6, m.bytes / m.seconds * 1e-9, m.bytes / m.seconds / copy_rate_,
                   m.bytes / m.seconds / m.same_size_copy, i + 1 < results_.size() ? "," : "");
    }
    std::fprintf(file, "]}\n");
    std::fclose(file);
  }

 private:
  void report(Measured m) {
    // A copy of as many bytes, for what a launch of this size can reach at all.
    double& same = same_size_[static_cast<size_t>(m.bytes)];
    if (same == 0.0) same = copy_rate(static_cast<size_t>(m.bytes));
    m.same_size_copy = same;
    const double rate = m.bytes / m.seconds;
    std::printf("%-12s %-9s %4d %7lld %10.2f %8.0f %6.3f %6.3f\n", m.name.c_str(), m.preset.c_str(),
                m.head_dim, static_cast<long long>(m.tokens), m.seconds * 1e6, rate * 1e-9,
                rate / copy_rate_, rate / same);
    std::fflush(stdout);
    results_.push_back(m);
  }

  const DeviceInfo* device_ = nullptr;
  double copy_rate_ = 0.0;
  std::map<size_t, double> same_size_;
  std::vector<Measured> results_;
};

}  // namespace
}  // namespace kvtile

int main(int argc, char** argv) {
  using kvtile::KeyCode;
  const int64_t only = argc > 2 ? std::atoll(argv[2]) : 0;
  kvtile::Bench bench;
  for (int64_t tokens : {2048, 8192, 32768}) {
    if (only != 0 && tokens != only) continue;
    for (const char* preset : {"4bit_nc", "k8v4", "k3v4_nc", "3bit_nc"}) {
      for (int head_dim : {128, 256, 64}) {
        if (head_dim != 128 && tokens != 8192) continue;
        bench.run(preset, KeyCode::kFp8E4M3, head_dim, tokens);
      }
    }
  }
  if (only == 0 || only == 8192) bench.run("k8v4", KeyCode::kFp8E4B15, 128, 8192);
  if (argc > 1) bench.write_json(argv[1]);
  return 0;
}
