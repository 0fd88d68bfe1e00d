// encode_slots() and decode_slots() on one thread: bytes/s of bf16 input and of output. One pass
// over 32,768 tokens of 8 heads reads or writes more than an L3, so nothing needs rotating.
#include <benchmark/benchmark.h>

#include "bench/workload.h"

namespace kvtile::bench {
namespace {

constexpr int kHeadDim = 128;
constexpr int kNumKvHeads = 8;
constexpr int64_t kNumTokens = 32768;
constexpr int64_t kElements = kNumTokens * kNumKvHeads * kHeadDim;  // of key, and of value

RunOptions one_thread() {
  RunOptions options;
  options.backend = "cpu";
  options.num_threads = 1;
  return options;
}

// A benchmark's first argument is its preset.
SlotFormat format_of(benchmark::State& state) {
  const char* preset = preset_name(static_cast<int>(state.range(0)));
  state.SetLabel(preset);
  SlotFormat format;
  const Status status = parse_preset(preset, kHeadDim, &format);
  if (!status.ok()) state.SkipWithError(status.message().c_str());
  return format;
}

// Rows, and the cache they are packed into.
struct Rows {
  explicit Rows(benchmark::State& state) : sequence(format_of(state), kNumTokens, kNumKvHeads, 0) {}
  EncodeCall encode_call() const {
    return sequence.encode_call(key.data(), value.data(), DType::kBFloat16);
  }

  PackedSequence sequence;
  std::vector<uint16_t> key = bf16_noise(kElements, 1), value = bf16_noise(kElements, 2);
};

// Argument: preset.
void encode_benchmark(benchmark::State& state) {
  const Rows rows(state);
  const EncodeCall call = rows.encode_call();
  for (auto _ : state) {
    const Status status = encode_slots(call, nullptr, one_thread());
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    benchmark::ClobberMemory();
  }
  state.counters["bytes/s"] = per_second(2.0 * kElements * sizeof(uint16_t));
}

// Arguments: preset, output DType, un-rotated keys.
void decode_benchmark(benchmark::State& state) {
  const Rows rows(state);
  Status status = encode_slots(rows.encode_call());
  if (!status.ok()) return state.SkipWithError(status.message().c_str());

  DecodeCall call;
  call.cache = rows.sequence.cache;
  call.slot_mapping = rows.sequence.slots.data();
  call.num_tokens = kNumTokens;
  call.dtype = static_cast<DType>(state.range(1));
  call.unrotate_keys = state.range(2) != 0;
  std::vector<float> key_out(kElements), value_out(kElements);  // room for the widest dtype
  call.key = key_out.data();
  call.value = value_out.data();
  for (auto _ : state) {
    status = decode_slots(call, one_thread());
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    benchmark::ClobberMemory();
  }
  state.counters["bytes/s"] = per_second(2.0 * kElements * dtype_bytes(call.dtype));
}

void encode_arguments(benchmark::internal::Benchmark* benchmark) {
  for (int preset = 0; preset < num_presets(); ++preset) benchmark->Arg(preset);
}

void decode_arguments(benchmark::internal::Benchmark* benchmark) {
  for (int preset = 0; preset < num_presets(); ++preset) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (int unrotate : {0, 1}) benchmark->Args({preset, static_cast<int>(dtype), unrotate});
    }
  }
}

BENCHMARK(encode_benchmark)
    ->Name("encode")
    ->ArgName("preset")
    ->Apply(encode_arguments)
    ->Unit(benchmark::kMillisecond);
BENCHMARK(decode_benchmark)
    ->Name("decode_slots")
    ->ArgNames({"preset", "dtype", "unrotate"})
    ->Apply(decode_arguments)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kvtile::bench
