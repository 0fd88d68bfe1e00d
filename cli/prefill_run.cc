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
#include <vector>

#include "cli/convert.h"
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

// Zeroed, page-aligned memory that counts as resident only where it is touched.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Status allocate(const char* what, int64_t bytes) {
    bytes_ = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return invalid(what, fmt::format("{} bytes", bytes_), "an amount this machine can allocate");
    }
    data_ = static_cast<std::byte*>(data);
    return {};
  }
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class Prefill {
 public:
  Prefill(const LayerSource& source, const PrefillPlan& plan, const ProgressFn& progress,
          PrefillResult* result)
      : source_(source), plan_(plan), progress_(progress), result_(*result) {
    options_.backend = plan.backend;
    options_.num_threads = plan.num_threads;
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
    KVTILE_RETURN_IF_ERROR(pages_.allocate("--context", slots * slot_row));
    cache_ = make_cache(pages_.data(), num_blocks, plan_.block_size, shape().num_kv_heads,
                        plan_.format, plan_.layout);
    block_table_.resize(static_cast<size_t>(num_blocks));
    std::iota(block_table_.begin(), block_table_.end(), 0);
    result_.cache_bytes = cache_.pages_bytes;
    result_.dense_cache_bytes = slots * shape().kv_elements() * 2 * 2;

    const int64_t width = dtype_bytes(shape().dtype), io_width = dtype_bytes(plan_.dtype);
    const int64_t query = plan_.chunk * shape().query_elements();
    const int64_t kv = plan_.chunk * shape().kv_elements();
    KVTILE_RETURN_IF_ERROR(query_.allocate("--chunk", query * width));
    KVTILE_RETURN_IF_ERROR(key_.allocate("--chunk", kv * width));
    KVTILE_RETURN_IF_ERROR(value_.allocate("--chunk", kv * width));
    KVTILE_RETURN_IF_ERROR(out_.allocate("--chunk", query * io_width));
    KVTILE_RETURN_IF_ERROR(lse_.allocate("--chunk", plan_.chunk * shape().num_heads * 4));
    if (plan_.dtype != shape().dtype) {
      KVTILE_RETURN_IF_ERROR(query_io_.allocate("--chunk", query * io_width));
      KVTILE_RETURN_IF_ERROR(key_io_.allocate("--chunk", kv * io_width));
      KVTILE_RETURN_IF_ERROR(value_io_.allocate("--chunk", kv * io_width));
    }
    size_t bytes = 0;
    KVTILE_RETURN_IF_ERROR(workspace_bytes(make_call(0, plan_.chunk), options_, &bytes));
    KVTILE_RETURN_IF_ERROR(workspace_.allocate("--chunk", static_cast<int64_t>(bytes)));
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

  Status encode(int64_t begin, int64_t count, const std::byte* key, const std::byte* value) {
    slots_.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = begin + i;
      slots_[static_cast<size_t>(i)] =
          int64_t{block_table_[static_cast<size_t>(t / plan_.block_size)]} * plan_.block_size +
          t % plan_.block_size;
    }
    EncodeCall call;
    call.key = key;
    call.value = value;
    call.dtype = shape().dtype;
    call.num_tokens = count;
    call.slot_mapping = slots_.data();
    call.cache = cache_;
    return encode_slots(call, &result_.encode, options_);
  }

  // Stores tokens [0, end) from the source, a bounded piece at a time.
  Status fill(int64_t end) {
    constexpr int64_t kPieceBytes = 8 << 20;
    const int64_t token_bytes = shape().kv_elements() * dtype_bytes(shape().dtype);
    const int64_t piece =
        std::clamp<int64_t>(kPieceBytes / token_bytes, 1, std::max<int64_t>(end, 1));
    Buffer key, value;
    KVTILE_RETURN_IF_ERROR(key.allocate("--context", piece * token_bytes));
    KVTILE_RETURN_IF_ERROR(value.allocate("--context", piece * token_bytes));
    const auto start = std::chrono::steady_clock::now();
    for (int64_t t = 0; t < end; t += piece) {
      const int64_t count = std::min(piece, end - t);
      source_.read_key_value(t, count, key.data(), value.data());
      KVTILE_RETURN_IF_ERROR(encode(t, count, key.data(), value.data()));
      progress_("fill", t + count, end);
    }
    result_.fill_seconds = seconds_since(start);
    return {};
  }

  // The chunk's rows in the dtype attend() is called with.
  const void* io_rows(const Buffer& raw, const Buffer& io) const {
    return plan_.dtype == shape().dtype ? raw.data() : io.data();
  }

  AttentionCall make_call(int64_t begin, int64_t count) {
    cu_seqlens_q_[1] = static_cast<int32_t>(count);
    seq_len_ = static_cast<int32_t>(begin + count);
    AttentionCall call;
    call.query = io_rows(query_, query_io_);
    call.out = out_.data();
    call.lse = reinterpret_cast<float*>(lse_.data());
    call.dtype = plan_.dtype;
    call.num_seqs = 1;
    call.total_q = count;
    call.num_heads = shape().num_heads;
    call.softmax_scale = plan_.softmax_scale;
    call.softcap = plan_.softcap;
    call.mask.window = plan_.window;
    call.cache = cache_;
    call.block_table = block_table_.data();
    call.max_blocks = static_cast<int64_t>(block_table_.size());
    call.cu_seqlens_q = cu_seqlens_q_;
    call.seq_lens = &seq_len_;
    call.chunk_key = io_rows(key_, key_io_);
    call.chunk_value = io_rows(value_, value_io_);
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
    const AttentionCall call = make_call(begin, count);
    const Workspace workspace{workspace_.data(), static_cast<size_t>(result_.workspace_bytes)};
    RunReport report;
    auto start = std::chrono::steady_clock::now();
    KVTILE_RETURN_IF_ERROR(attend(call, workspace, options_, &report));
    result_.attend_seconds += seconds_since(start);
    start = std::chrono::steady_clock::now();
    KVTILE_RETURN_IF_ERROR(encode(begin, count, key_.data(), value_.data()));
    result_.encode_seconds += seconds_since(start);

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
    return check_rows(call, source_, begin, std::span(in_chunk(begin), in_chunk(begin + count)),
                      plan_.num_threads, &result_.errors);
  }

  const LayerSource& source_;
  const PrefillPlan& plan_;
  const ProgressFn& progress_;
  PrefillResult& result_;
  RunOptions options_;
  Buffer pages_, query_, key_, value_, query_io_, key_io_, value_io_, out_, lse_, workspace_;
  PagedCache cache_;
  std::vector<int32_t> block_table_;
  std::vector<int64_t> slots_;
  std::vector<RowSample> samples_;  // by position
  int32_t cu_seqlens_q_[2] = {0, 0};
  int32_t seq_len_ = 0;
};

}  // namespace

Status run_prefill(const LayerSource& source, const PrefillPlan& plan, const ProgressFn& progress,
                   PrefillResult* result) {
  return Prefill(source, plan, progress, result).run();
}

}  // namespace kvtile
