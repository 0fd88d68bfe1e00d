// attend() on the CPU backend: prefill rows with a raw causal chunk, and decode, over 32,768 cached
// tokens of every preset. FLOP/s counts 4 * head_dim * num_heads for each visible (query, key)
// pair; bytes/s are packed cache bytes, counted once however often they are read.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "bench/workload.h"
#include "kvtile/attention.h"

namespace kvtile::bench {
namespace {

constexpr int kHeadDim = 128;
constexpr int kNumKvHeads = 4;
constexpr int64_t kCached = 32768;

struct AlignedFree {
  void operator()(void* data) const { std::free(data); }
};

// Arguments: preset, group (query heads per KV head), q_len, threads.
void attend_benchmark(benchmark::State& state) {
  const char* preset = preset_name(static_cast<int>(state.range(0)));
  const int num_heads = static_cast<int>(state.range(1)) * kNumKvHeads;
  const int64_t q_len = state.range(2);
  const bool raw_chunk = q_len > 1;
  RunOptions options;
  options.backend = "cpu";
  options.num_threads = static_cast<int>(state.range(3));
  state.SetLabel(preset);

  SlotFormat format;
  Status status = parse_preset(preset, kHeadDim, &format);
  if (!status.ok()) return state.SkipWithError(status.message().c_str());

  std::vector<std::unique_ptr<PackedSequence>> sequences;
  const std::vector<float> key = noise(kCached * kNumKvHeads * kHeadDim, 1);
  const std::vector<float> value = noise(kCached * kNumKvHeads * kHeadDim, 2);
  for (int64_t total_bytes = 0; total_bytes <= 2 * level3_bytes();) {
    const auto seed = static_cast<uint32_t>(sequences.size());
    sequences.push_back(std::make_unique<PackedSequence>(format, kCached, kNumKvHeads, seed));
    const PackedSequence& sequence = *sequences.back();
    status = encode_slots(sequence.encode_call(key.data(), value.data(), DType::kFloat32));
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    total_bytes += static_cast<int64_t>(sequence.pages.size());
  }

  const std::vector<uint16_t> query = bf16_noise(q_len * num_heads * kHeadDim, 3);
  const std::vector<uint16_t> chunk = bf16_noise(q_len * kNumKvHeads * kHeadDim, 4);
  std::vector<uint16_t> out(query.size());
  const int32_t cu_seqlens_q[] = {0, static_cast<int32_t>(q_len)};
  const int32_t seq_lens[] = {static_cast<int32_t>(raw_chunk ? kCached + q_len : kCached)};

  AttentionCall call;
  call.query = query.data();
  call.out = out.data();
  call.num_seqs = 1;
  call.total_q = q_len;
  call.num_heads = num_heads;
  call.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  call.cu_seqlens_q = cu_seqlens_q;
  call.seq_lens = seq_lens;
  if (raw_chunk) call.chunk_key = call.chunk_value = chunk.data();

  // The table covers every position; pages of a raw chunk are never read.
  std::vector<std::vector<int32_t>> tables;
  for (const auto& sequence : sequences) {
    tables.push_back(sequence->block_table);
    tables.back().resize((seq_lens[0] + kBlockSize - 1) / kBlockSize, 0);
  }
  call.max_blocks = static_cast<int64_t>(tables[0].size());
  call.cache = sequences[0]->cache;

  Workspace workspace;
  status = workspace_bytes(call, options, &workspace.bytes);
  if (!status.ok()) return state.SkipWithError(status.message().c_str());
  const std::unique_ptr<void, AlignedFree> scratch(
      std::aligned_alloc(64, (workspace.bytes + 63) / 64 * 64));
  workspace.data = scratch.get();

  size_t turn = 0;
  for (auto _ : state) {
    call.cache = sequences[turn]->cache;
    call.block_table = tables[turn].data();
    turn = (turn + 1) % sequences.size();
    status = attend(call, workspace, options);
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }

  const int64_t pairs = raw_chunk ? q_len * kCached + q_len * (q_len + 1) / 2 : kCached;
  state.counters["FLOP/s"] = per_second(4.0 * kHeadDim * num_heads * static_cast<double>(pairs));
  state.counters["bytes/s"] = per_second(static_cast<double>(sequences[0]->pages.size()));
  state.counters["workspace"] = benchmark::Counter(static_cast<double>(workspace.bytes));
}

void prefill_arguments(benchmark::internal::Benchmark* benchmark) {
  for (int preset = 0; preset < num_presets(); ++preset) {
    for (int group : {4, 8}) {
      for (int threads : {1, 2}) benchmark->Args({preset, group, 128, threads});
    }
  }
}

void decode_arguments(benchmark::internal::Benchmark* benchmark) {
  for (int preset = 0; preset < num_presets(); ++preset) {
    for (int group : {1, 4, 8}) {
      for (int threads : {1, 2}) benchmark->Args({preset, group, 1, threads});
    }
  }
}

BENCHMARK(attend_benchmark)
    ->Name("prefill")
    ->ArgNames({"preset", "group", "q_len", "threads"})
    ->Apply(prefill_arguments)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(attend_benchmark)
    ->Name("decode")
    ->ArgNames({"preset", "group", "q_len", "threads"})
    ->Apply(decode_arguments)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kvtile::bench
