// The chunk loop and its buffers.
#include "cli/prefill_run.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/convert.h"
#include "cli/staged.h"
#include "src/core/status.h"

namespace kvtile {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t peak_rss_bytes() {
  struct rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

// What the kernel says can be had without swapping; the largest int64 if it does not say.
int64_t available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  int64_t kib = 0;
  while (file >> name >> kib && std::getline(file, unit)) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return std::numeric_limits<int64_t>::max();
}

// Zeroed, page-aligned memory that counts as resident only where it is touched; and its twin on the
// device where the backend is there. Without one, the engine sees the host's bytes themselves.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Status allocate(const char* what, int64_t bytes, bool on_device) {
    bytes_ = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return invalid(what, fmt::format("{} bytes", bytes_), "an amount this machine can allocate");
    }
    data_ = static_cast<std::byte*>(data);
    return on_device ? device_.allocate(bytes_) : Status();
  }
  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // Where the engine reads and writes.
  std::byte* engine() const { return device_.data() != nullptr ? device_.data() : data_; }
  Status to_engine(int64_t bytes) {
    if (device_.data() == nullptr) return {};
    return device_.upload(data_, static_cast<size_t>(bytes));
  }
  Status from_engine(int64_t bytes, int64_t offset = 0) {
    if (device_.data() == nullptr) return {};
    return device_.download(data_ + offset, static_cast<size_t>(bytes),
                            static_cast<size_t>(offset));
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  DeviceMemory device_;
};

class Prefill {
 public:
  Prefill(const LayerSource& source, const PrefillPlan& plan, const ProgressFn& progress,
          PrefillResult* result)
      : source_(source), plan_(plan), progress_(progress), result_(*result) {
    options_.backend = plan.backend;
    options_.num_threads = plan.num_threads;
    on_device_ = is_cuda_backend(plan.backend);
  }

  Status run() {
    KVTILE_RETURN_IF_ERROR(allocate());
    choose_samples();
    int64_t begin = 0;
    if (plan_.last_chunk_only) {
      begin = std::max<int64_t>(0, plan_.context - plan_.chunk);
      KVTILE_RETURN_IF_ERROR(fill(begin));
    }
    while (begin < plan_.context) {
      const int64_t count = std::min(plan_.chunk, plan_.context - begin);
      KVTILE_RETURN_IF_ERROR(run_chunk(begin, count));
      begin += count;
      progress_("prefill", begin, plan_.context);
    }
    return {};
  }

 private:
  const LayerShape& shape() const { return source_.shape; }

  Status allocate() {
    const int64_t block_size = plan_.block_size;
    const int64_t num_blocks = (plan_.context + block_size - 1) / block_size;
    if (num_blocks > std::numeric_limits<int32_t>::max() ||
        plan_.context > std::numeric_limits<int32_t>::max()) {
      return invalid("--context", plan_.context, "what 32-bit lengths and page numbers reach");
    }
    const int64_t slots = num_blocks * block_size;
    const int64_t slot_row = int64_t{shape().num_kv_heads} * plan_.format.slot_bytes();
    const int64_t available = available_memory_bytes();
    // The product may not fit 64 bits, so the page count is compared instead.
    if (slots > available / slot_row) {
      return invalid("--context", plan_.context,
                     fmt::format("a cache within the {} bytes of memory available ({} bytes per "
                                 "token)",
                                 available, slot_row));
    }
    KVTILE_RETURN_IF_ERROR(pages_.allocate("--context", slots * slot_row, on_device_));
    cache_ = make_cache(pages_.data(), num_blocks, plan_.block_size, shape().num_kv_heads,
                        plan_.format, plan_.layout);
    KVTILE_RETURN_IF_ERROR(block_table_.allocate("--context", num_blocks * 4, on_device_));
    std::iota(block_table_.as<int32_t>(), block_table_.as<int32_t>() + num_blocks, 0);
    KVTILE_RETURN_IF_ERROR(block_table_.to_engine(num_blocks * 4));
    KVTILE_RETURN_IF_ERROR(
        slots_.allocate("--chunk", std::max(plan_.chunk, fill_tokens()) * 8, on_device_));
    KVTILE_RETURN_IF_ERROR(lengths_.allocate("--context", kLengths * 4, on_device_));
    result_.cache_bytes = cache_.pages_bytes;
    result_.dense_cache_bytes = slots * shape().kv_elements() * 2 * 2;

    const int64_t width = dtype_bytes(shape().dtype), io_width = dtype_bytes(plan_.dtype);
    const int64_t query = plan_.chunk * shape().query_elements();
    const int64_t kv = plan_.chunk * shape().kv_elements();
    KVTILE_RETURN_IF_ERROR(query_.allocate("--chunk", query * width, on_device_));
    KVTILE_RETURN_IF_ERROR(key_.allocate("--chunk", kv * width, on_device_));
    KVTILE_RETURN_IF_ERROR(value_.allocate("--chunk", kv * width, on_device_));
    KVTILE_RETURN_IF_ERROR(out_.allocate("--chunk", query * io_width, on_device_));
    KVTILE_RETURN_IF_ERROR(
        lse_.allocate("--chunk", plan_.chunk * shape().num_heads * 4, on_device_));
    if (plan_.dtype != shape().dtype) {
      KVTILE_RETURN_IF_ERROR(query_io_.allocate("--chunk", query * io_width, on_device_));
      KVTILE_RETURN_IF_ERROR(key_io_.allocate("--chunk", kv * io_width, on_device_));
      KVTILE_RETURN_IF_ERROR(value_io_.allocate("--chunk", kv * io_width, on_device_));
    }
    size_t bytes = 0;
    KVTILE_RETURN_IF_ERROR(workspace_bytes(make_call(0, plan_.chunk, true), options_, &bytes));
    KVTILE_RETURN_IF_ERROR(workspace_.allocate("--chunk", static_cast<int64_t>(bytes), on_device_));
    result_.workspace_bytes = static_cast<int64_t>(bytes);
    result_.one_shot_bytes =
        (2 * plan_.context - std::min(plan_.chunk, plan_.context)) * shape().kv_elements() * 2 * 2;
    return {};
  }

  int64_t visible(int64_t position) const {
    return plan_.window > 0 ? std::min(position + 1, plan_.window) : position + 1;
  }

  // Rows spread evenly over the attended positions, the last one included, and over the heads. The
  // oracle visits every key of a row, so long contexts are checked on fewer rows.
  void choose_samples() {
    if (!plan_.check) return;
    const int64_t first =
        plan_.last_chunk_only ? std::max<int64_t>(0, plan_.context - plan_.chunk) : 0;
    const int64_t span = plan_.context - first;
    int64_t count = plan_.check_rows;
    if (count == 0) {
      constexpr int64_t kBudget = 1'000'000'000;  // key elements the oracle unpacks in all
      count = std::clamp<int64_t>(kBudget / (visible(plan_.context - 1) * shape().head_dim), 4, 64);
    }
    count = std::min(count, span * shape().num_heads);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = first + (i + 1) * span / count - 1;
      // An odd stride coprime to most head counts visits groups and members alike.
      const int head = static_cast<int>(i * 7 % shape().num_heads);
      samples_.push_back({std::max(first, position), head});
    }
  }

  // Stores `count` rows of key and value as tokens from `begin`.
  Status encode(int64_t begin, int64_t count, const Buffer& key, const Buffer& value) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = begin + i;
      slots_.as<int64_t>()[i] =
          int64_t{block_table_.as<int32_t>()[t / plan_.block_size]} * plan_.block_size +
          t % plan_.block_size;
    }
    KVTILE_RETURN_IF_ERROR(slots_.to_engine(count * 8));
    EncodeCall call;
    call.key = key.engine();
    call.value = value.engine();
    call.dtype = shape().dtype;
    call.num_tokens = count;
    call.slot_mapping = reinterpret_cast<const int64_t*>(slots_.engine());
    call.cache = cache_;
    call.cache.pages = pages_.engine();
    return timed(&result_.encode_seconds, [&] {
      // Counters of bent elements would need a read back from a device.
      return encode_slots(call, on_device_ ? nullptr : &result_.encode, codec_options(options_));
    });
  }

  // The host's copy of the pages of tokens [begin, end), which the checks read.
  Status fetch_pages(int64_t begin, int64_t end) {
    if (!plan_.check || end <= begin) return {};
    const int64_t first = begin / plan_.block_size, last = (end - 1) / plan_.block_size;
    return pages_.from_engine((last + 1 - first) * cache_.stride_block,
                              first * cache_.stride_block);
  }

  // Adds the wall time of an engine call. On a device it is waited for, before and after, and the
  // first call of each kind runs once unmeasured, because it loads the code.
  template <typename Call>
  Status timed(double* seconds, const Call& call) {
    if (on_device_) {
      if (*seconds == 0) KVTILE_RETURN_IF_ERROR(call());
      KVTILE_RETURN_IF_ERROR(synchronize_device());
    }
    const auto start = std::chrono::steady_clock::now();
    KVTILE_RETURN_IF_ERROR(call());
    if (on_device_) KVTILE_RETURN_IF_ERROR(synchronize_device());
    *seconds += seconds_since(start);
    return {};
  }

  // Tokens stored at a time before the first chunk.
  int64_t fill_tokens() const {
    constexpr int64_t kPieceBytes = 8 << 20;
    return std::max<int64_t>(1, kPieceBytes / (shape().kv_elements() * dtype_bytes(shape().dtype)));
  }

  // Stores tokens [0, end) from the source, a bounded piece at a time.
  Status fill(int64_t end) {
    const int64_t token_bytes = shape().kv_elements() * dtype_bytes(shape().dtype);
    const int64_t piece = std::min(fill_tokens(), std::max<int64_t>(end, 1));
    Buffer key, value;
    KVTILE_RETURN_IF_ERROR(key.allocate("--context", piece * token_bytes, on_device_));
    KVTILE_RETURN_IF_ERROR(value.allocate("--context", piece * token_bytes, on_device_));
    const auto start = std::chrono::steady_clock::now();
    for (int64_t t = 0; t < end; t += piece) {
      const int64_t count = std::min(piece, end - t);
      source_.read_key_value(t, count, key.data(), value.data());
      KVTILE_RETURN_IF_ERROR(key.to_engine(count * token_bytes));
      KVTILE_RETURN_IF_ERROR(value.to_engine(count * token_bytes));
      KVTILE_RETURN_IF_ERROR(encode(t, count, key, value));
      progress_("fill", t + count, end);
    }
    result_.encode_seconds = 0;  // of the chunks alone
    result_.fill_seconds = seconds_since(start);
    return fetch_pages(0, end);
  }

  // The chunk's rows in the dtype attend() is called with.
  Buffer& io_rows(Buffer& raw, Buffer& io) { return plan_.dtype == shape().dtype ? raw : io; }

  // The call on the engine's memory, or the same call on the host's, which the checks read.
  AttentionCall make_call(int64_t begin, int64_t count, bool engine) {
    const auto at = [engine](const Buffer& buffer) {
      return engine ? buffer.engine() : buffer.data();
    };
    auto* lengths = lengths_.as<int32_t>();
    lengths[0] = 0;
    lengths[1] = static_cast<int32_t>(count);
    lengths[2] = static_cast<int32_t>(begin + count);
    AttentionCall call;
    call.query = at(io_rows(query_, query_io_));
    call.out = at(out_);
    call.lse = reinterpret_cast<float*>(at(lse_));
    call.dtype = plan_.dtype;
    call.num_seqs = 1;
    call.total_q = count;
    call.num_heads = shape().num_heads;
    call.softmax_scale = plan_.softmax_scale;
    call.softcap = plan_.softcap;
    call.mask.window = plan_.window;
    call.cache = cache_;
    call.cache.pages = at(pages_);
    call.block_table = reinterpret_cast<const int32_t*>(at(block_table_));
    call.max_blocks = cache_.num_blocks;
    call.cu_seqlens_q = reinterpret_cast<const int32_t*>(at(lengths_));
    call.seq_lens = call.cu_seqlens_q + 2;
    call.chunk_key = at(io_rows(key_, key_io_));
    call.chunk_value = at(io_rows(value_, value_io_));
    call.tile_tokens = plan_.tile_tokens;
    call.max_q_len = count;
    call.max_seq_len = begin + count;
    return call;
  }

  void widen_chunk(int64_t count) {
    if (plan_.dtype == shape().dtype) return;
    const int64_t query = count * shape().query_elements(), kv = count * shape().kv_elements();
    widen(query_.data(), shape().dtype, query, reinterpret_cast<float*>(query_io_.data()));
    widen(key_.data(), shape().dtype, kv, reinterpret_cast<float*>(key_io_.data()));
    widen(value_.data(), shape().dtype, kv, reinterpret_cast<float*>(value_io_.data()));
  }

  Status run_chunk(int64_t begin, int64_t count) {
    source_.read_query(begin, count, query_.data());
    source_.read_key_value(begin, count, key_.data(), value_.data());
    widen_chunk(count);
    const AttentionCall call = make_call(begin, count, true);
    const int64_t query = count * shape().query_elements(), kv = count * shape().kv_elements();
    const int64_t width = dtype_bytes(shape().dtype), io_width = dtype_bytes(plan_.dtype);
    KVTILE_RETURN_IF_ERROR(lengths_.to_engine(kLengths * 4));
    KVTILE_RETURN_IF_ERROR(io_rows(query_, query_io_).to_engine(query * io_width));
    for (auto [rows, bytes] : {std::pair{&key_, kv * width}, std::pair{&value_, kv * width},
                               std::pair{&io_rows(key_, key_io_), kv * io_width},
                               std::pair{&io_rows(value_, value_io_), kv * io_width}}) {
      KVTILE_RETURN_IF_ERROR(rows->to_engine(bytes));
    }
    const Workspace workspace{workspace_.engine(), static_cast<size_t>(result_.workspace_bytes)};
    RunReport report;
    KVTILE_RETURN_IF_ERROR(
        timed(&result_.attend_seconds, [&] { return attend(call, workspace, options_, &report); }));
    KVTILE_RETURN_IF_ERROR(encode(begin, count, key_, value_));
    KVTILE_RETURN_IF_ERROR(out_.from_engine(query * io_width));
    KVTILE_RETURN_IF_ERROR(lse_.from_engine(count * shape().num_heads * 4));
    KVTILE_RETURN_IF_ERROR(fetch_pages(begin, begin + count));

    result_.backend = report.backend == nullptr ? plan_.backend : report.backend;
    result_.tile_tokens = report.tile_tokens;
    result_.query_tokens += count;
    for (int64_t i = 0; i < count; ++i) result_.visible_pairs += visible(begin + i);
    if (begin + count == plan_.context) result_.peak_rss_bytes = peak_rss_bytes();

    const auto in_chunk = [&](int64_t position) {
      return std::lower_bound(
          samples_.begin(), samples_.end(), position,
          [](const RowSample& sample, int64_t p) { return sample.position < p; });
    };
    return check_rows(make_call(begin, count, false), source_, begin,
                      std::span(in_chunk(begin), in_chunk(begin + count)), plan_.num_threads,
                      &result_.errors);
  }

  const LayerSource& source_;
  const PrefillPlan& plan_;
  const ProgressFn& progress_;
  PrefillResult& result_;
  static constexpr int64_t kLengths = 3;  // cu_seqlens_q, then seq_lens

  RunOptions options_;
  bool on_device_ = false;
  Buffer pages_, query_, key_, value_, query_io_, key_io_, value_io_, out_, lse_, workspace_;
  Buffer block_table_, lengths_, slots_;
  PagedCache cache_;                // on the host
  std::vector<RowSample> samples_;  // by position
};

}  // namespace

Status run_prefill(const LayerSource& source, const PrefillPlan& plan, const ProgressFn& progress,
                   PrefillResult* result) {
  return Prefill(source, plan, progress, result).run();
}

}  // namespace kvtile
