// Hostile pages, block tables, lengths and shapes against decode_slots() and attend(). Buffers are
// exactly as large as the call's documentation says, so AddressSanitizer sees any byte read beyond
// it. Checked besides: a refused call has written nothing, and neither verdict nor bits depend on
// the number of threads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kvtile/attention.h"
#include "kvtile/cache.h"
#include "kvtile/codec.h"

namespace {

using namespace kvtile;  // NOLINT: the whole file is about it

// Deals out the input; an exhausted input deals zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  int below(int bound) { return (byte() << 8 | byte()) % bound; }
  void fill(void* out, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) static_cast<uint8_t*>(out)[i] = byte();
  }
  // Repeats what is left of the input over a buffer larger than it is.
  void tile(void* out, size_t bytes) {
    const size_t left = size_ - at_;
    for (size_t i = 0; i < bytes; ++i) {
      static_cast<uint8_t*>(out)[i] = left == 0 ? 0 : data_[at_ + i % left];
    }
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

constexpr int kPoison = 0xA5;
constexpr float kUnwritten = -12345.0f;

struct Result {
  Status status;
  std::vector<std::byte> out;
  std::vector<float> lse;

  bool untouched() const {
    return std::all_of(out.begin(), out.end(),
                       [](std::byte b) { return b == std::byte{kPoison}; }) &&
           std::all_of(lse.begin(), lse.end(), [](float x) { return x == kUnwritten; });
  }
};

Result run(AttentionCall call, size_t out_bytes, size_t lse_count, int num_threads) {
  Result result;
  result.out.assign(out_bytes, std::byte{kPoison});
  result.lse.assign(lse_count, kUnwritten);
  call.out = result.out.data();
  call.lse = result.lse.data();
  RunOptions options;
  options.num_threads = num_threads;
  options.backend = "cpu";
  size_t bytes = 0;
  result.status = workspace_bytes(call, options, &bytes);
  if (!result.status.ok()) return result;
  void* scratch = ::operator new (bytes, std::align_val_t{64});
  result.status = attend(call, {scratch, bytes}, options);
  ::operator delete (scratch, std::align_val_t{64});
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int head_dims[] = {32, 64, 8, 96, 128, 72};
  SlotFormat format;
  const char* preset = preset_name(in.below(num_presets()));
  const KeyCode fp8 = in.byte() & 1 ? KeyCode::kFp8E4B15 : KeyCode::kFp8E4M3;
  const int head_dim = head_dims[in.below(6)];
  if (!parse_preset(preset, head_dim, &format, fp8).ok()) return 0;

  const int num_blocks = in.below(8), block_size = 1 + in.below(20), num_kv_heads = 1 + in.below(3);
  const PageLayout layout = in.byte() & 1 ? PageLayout::kHeadMajor : PageLayout::kTokenMajor;
  const int slot = format.slot_bytes() + 2 * in.below(3);
  PagedCache cache =
      make_cache(nullptr, num_blocks, block_size, num_kv_heads, format, layout, slot);
  // The last slot's padding is not part of the pool.
  cache.pages_bytes = cache_extent_bytes(cache);

  AttentionCall call;
  call.num_seqs = 1 + in.below(3);
  call.num_heads = num_kv_heads * (1 + in.below(4));
  call.dtype = static_cast<DType>(in.below(3));
  call.softmax_scale = 0.01f * static_cast<float>(in.byte());
  call.softcap = static_cast<float>(in.byte() & 15);
  call.mask.causal = (in.byte() & 1) != 0;
  call.mask.window = in.below(40);
  call.tile_tokens = in.below(100);
  call.max_blocks = in.below(5);
  const bool raw_chunk = (in.byte() & 1) != 0, with_sinks = (in.byte() & 1) != 0;

  // Tables and lengths are mostly plausible, sometimes anything at all.
  std::vector<int32_t> table(static_cast<size_t>(call.num_seqs * call.max_blocks));
  std::vector<int32_t> starts(static_cast<size_t>(call.num_seqs) + 1);
  std::vector<int32_t> lengths(static_cast<size_t>(call.num_seqs));
  auto deal = [&in](int bound) {
    const int choice = in.byte();
    int32_t any = 0;
    if (choice >= 252) {
      in.fill(&any, sizeof(any));
      return any;
    }
    if (choice >= 248) return -1;
    return choice >= 244 ? bound : static_cast<int32_t>(in.below(std::max(bound, 1)));
  };
  for (int32_t& entry : table) entry = deal(num_blocks);
  for (int32_t& length : lengths) {
    length = deal(static_cast<int>(call.max_blocks) * block_size + 1);
  }
  for (int s = 0; s < call.num_seqs; ++s) {
    const int q_len = deal(6);
    starts[static_cast<size_t>(s) + 1] = static_cast<int32_t>(
        static_cast<uint32_t>(starts[static_cast<size_t>(s)]) + static_cast<uint32_t>(q_len));
  }
  call.total_q = std::clamp<int64_t>(starts.back(), 0, 64);

  std::vector<std::byte> pages(static_cast<size_t>(cache.pages_bytes));
  in.tile(pages.data(), pages.size());
  cache.pages = pages.data();
  const size_t element = static_cast<size_t>(dtype_bytes(call.dtype));
  const size_t rows = static_cast<size_t>(call.total_q);
  std::vector<std::byte> query(rows * static_cast<size_t>(call.num_heads * head_dim) * element);
  std::vector<std::byte> chunk(rows * static_cast<size_t>(num_kv_heads * head_dim) * element);
  std::vector<float> sinks(static_cast<size_t>(call.num_heads), 0.5f);
  in.tile(query.data(), query.size());
  in.tile(chunk.data(), chunk.size());
  call.cache = cache;
  call.query = query.data();
  call.block_table = table.data();
  call.cu_seqlens_q = starts.data();
  call.seq_lens = lengths.data();
  if (raw_chunk) call.chunk_key = call.chunk_value = chunk.data();
  if (with_sinks) call.sinks = sinks.data();

  const size_t lse_count = rows * static_cast<size_t>(call.num_heads);
  const Result one = run(call, query.size(), lse_count, 1);
  const Result two = run(call, query.size(), lse_count, 2);
  if (one.status.code() != two.status.code() || one.out != two.out ||
      (lse_count != 0 &&
       std::memcmp(one.lse.data(), two.lse.data(), lse_count * sizeof(float)) != 0)) {
    abort();
  }
  if (!one.status.ok() && (!one.untouched() || one.status.message().empty())) abort();

  std::vector<int64_t> slots(static_cast<size_t>(in.below(20)));
  for (int64_t& index : slots) index = deal(num_blocks * block_size);
  const size_t elements = slots.size() * static_cast<size_t>(num_kv_heads * head_dim);
  std::vector<float> key(elements), value(elements);
  DecodeCall decode;
  decode.cache = cache;
  decode.slot_mapping = slots.data();
  decode.num_tokens = static_cast<int64_t>(slots.size());
  decode.key = key.data();
  decode.value = value.data();
  decode.unrotate_keys = with_sinks;
  static_cast<void>(decode_slots(decode));
  return 0;
}
