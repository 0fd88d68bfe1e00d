// Case lists.
#include "tests/testing/cases.h"

#include <algorithm>
#include <iterator>

namespace kvtile::testing {
namespace {

AttendSpec base(const FormatName& name) {
  AttendSpec spec;
  spec.preset = name.preset;
  spec.fp8 = name.fp8;
  return spec;
}

template <typename T, size_t N>
T pick(Random* random, const T (&choices)[N]) {
  return choices[random->integer(0, static_cast<int64_t>(N) - 1)];
}

// Gives every case its own data.
std::vector<AttendSpec> seeded(std::vector<AttendSpec> cases) {
  uint64_t seed = 1000;
  for (AttendSpec& spec : cases) spec.seed = seed++;
  return cases;
}

}  // namespace

const std::vector<FormatName>& format_names() {
  static const std::vector<FormatName> names = {{"k8v4", KeyCode::kFp8E4M3},
                                                {"k8v4", KeyCode::kFp8E4B15},
                                                {"4bit_nc", KeyCode::kFp8E4M3},
                                                {"k3v4_nc", KeyCode::kFp8E4M3},
                                                {"3bit_nc", KeyCode::kFp8E4M3}};
  return names;
}

std::vector<int> head_dims(const FormatName& name) {
  if (std::string(name.preset) != "k8v4") return {32, 64, 128, 256, 512};
  return {8, 16, 24, 40, 64, 72, 80, 96, 120, 128, 192, 256, 264, 376, 504, 512};
}

std::string format_label(const FormatName& name, int head_dim) {
  return format_name(make_format(name.preset, head_dim, name.fp8)) + " d" +
         std::to_string(head_dim);
}

std::vector<AttendSpec> head_dim_cases() {
  std::vector<AttendSpec> cases;
  for (const FormatName& name : format_names()) {
    for (int head_dim : head_dims(name)) {
      for (bool raw : {false, true}) {
        AttendSpec spec = base(name);
        spec.head_dim = head_dim;
        spec.raw_chunk = raw;
        spec.seqs = {{0, 5}, {33, 1}, {61, 3}};
        cases.push_back(spec);
      }
    }
  }
  return seeded(cases);
}

std::vector<AttendSpec> geometry_cases() {
  std::vector<AttendSpec> cases;
  for (const FormatName& name : format_names()) {
    for (int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 71}) {
      AttendSpec spec = base(name);
      spec.group = group;
      spec.num_kv_heads = group > 16 ? 2 : 1 + group % 3;
      spec.raw_chunk = group % 2 == 1;
      spec.seqs = {{37, 1}, {18, 4}};
      cases.push_back(spec);
    }
    for (int block_size : {1, 2, 7, 16, 17, 32, 64, 256, 784}) {
      for (PageLayout layout :
           {PageLayout::kTokenMajor, PageLayout::kHeadMajor, PageLayout::kStrided}) {
        AttendSpec spec = base(name);
        spec.block_size = block_size;
        spec.layout = layout;
        spec.slot_padding = layout == PageLayout::kTokenMajor ? 0 : 6;
        spec.strided = layout == PageLayout::kStrided;
        spec.raw_chunk = block_size % 2 == 1;
        spec.seqs = {{block_size - 1, 2}, {2 * block_size % 131, 5}};
        cases.push_back(spec);
      }
    }
  }
  return seeded(cases);
}

std::vector<AttendSpec> length_cases() {
  std::vector<AttendSpec> cases;
  constexpr int64_t kCached[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 127, 128, 129};
  constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 65};
  for (const FormatName& name : format_names()) {
    for (bool raw : {false, true}) {
      // Each query length meets all cached lengths in one varlen batch, and alone meets some.
      for (int64_t rows : kRows) {
        AttendSpec spec = base(name);
        spec.head_dim = 32;
        spec.num_kv_heads = 1;
        spec.group = rows > 16 ? 1 : 3;
        spec.raw_chunk = raw;
        spec.seqs.clear();
        for (int64_t cached : kCached) {
          if (rows <= 16 || cached % 16 == 1) spec.seqs.push_back({cached, rows});
        }
        cases.push_back(spec);
        spec.tile_tokens = 16;
        spec.seqs = {{100 + rows, rows}};
        cases.push_back(spec);
      }
      AttendSpec mixed = base(name);
      mixed.raw_chunk = raw;
      mixed.seqs = {{0, 0}, {129, 1}, {0, 1},  {40, 4},  {0, 33},
                    {7, 0}, {-3, 5},  {-2, 2}, {500, 20}};
      cases.push_back(mixed);
      mixed.tile_tokens = 48;
      cases.push_back(mixed);
    }
  }
  return seeded(cases);
}

std::vector<AttendSpec> mask_cases() {
  std::vector<AttendSpec> cases;
  for (const FormatName& name : format_names()) {
    for (int64_t window : {0, 1, 2, 15, 16, 17, 33, 1 << 20}) {
      for (bool causal : {true, false}) {
        for (bool raw : {false, true}) {
          AttendSpec spec = base(name);
          spec.mask = {causal, window};
          spec.raw_chunk = raw;
          spec.sinks = (window & 1) == 1;
          spec.softcap = window % 3 == 1 ? 2.5f : 0.0f;
          spec.short_tables = causal;
          spec.seqs = {{90, 7}, {0, 20}, {64, 1}, {-2, 4}};
          spec.tile_tokens = window == 33 ? 32 : 0;
          cases.push_back(spec);
        }
      }
    }
    for (bool sinks : {false, true}) {
      for (float softcap : {0.0f, 0.7f, 30.0f}) {
        AttendSpec spec = base(name);
        spec.sinks = sinks;
        spec.softcap = softcap;
        spec.raw_chunk = softcap < 1;
        cases.push_back(spec);
      }
    }
  }
  return seeded(cases);
}

std::vector<AttendSpec> dtype_cases() {
  std::vector<AttendSpec> cases;
  for (const FormatName& name : format_names()) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (bool raw : {false, true}) {
        for (bool strided : {false, true}) {
          AttendSpec spec = base(name);
          spec.head_dim = 128;
          spec.dtype = dtype;
          spec.raw_chunk = raw;
          spec.strided = strided;
          spec.seqs = {{77, 6}, {16, 1}, {0, 9}};
          cases.push_back(spec);
        }
      }
    }
  }
  return seeded(cases);
}

AttendSpec random_spec(uint64_t seed) {
  Random random(seed);
  const FormatName name =
      format_names()[static_cast<size_t>(random.integer(0, std::ssize(format_names()) - 1))];
  AttendSpec spec = base(name);
  spec.seed = seed;
  const std::vector<int> dims = head_dims(name);
  do {
    spec.head_dim = dims[static_cast<size_t>(random.integer(0, std::ssize(dims) - 1))];
  } while (spec.head_dim > 256 && random.integer(0, 3) != 0);
  constexpr int kKvHeads[] = {1, 1, 2, 3, 4};
  constexpr int kGroups[] = {1, 2, 3, 4, 5, 7, 8, 9, 12};
  constexpr int kBlocks[] = {1, 3, 8, 16, 16, 16, 32, 33, 64, 128};
  constexpr int kPadding[] = {0, 0, 2, 10, 58};
  constexpr int64_t kWindows[] = {0, 0, 0, 1, 5, 16, 40, 100};
  constexpr int64_t kTiles[] = {0, 0, 1, 16, 32, 64, 100};
  constexpr int64_t kCached[] = {0, 1, 16, 31, 47, 64, 100, 129, 200};
  constexpr int64_t kRows[] = {0, 1, 1, 1, 2, 3, 4, 8, 9, 20};
  spec.num_kv_heads = pick(&random, kKvHeads);
  spec.group = pick(&random, kGroups);
  spec.block_size = pick(&random, kBlocks);
  spec.slot_padding = pick(&random, kPadding);
  spec.layout = static_cast<PageLayout>(random.integer(0, 2));
  spec.dtype = static_cast<DType>(random.integer(0, 2));
  spec.mask.causal = random.integer(0, 4) != 0;
  spec.mask.window = pick(&random, kWindows);
  spec.softcap = random.integer(0, 4) == 0 ? 3.0f : 0.0f;
  spec.sinks = random.integer(0, 3) == 0;
  spec.raw_chunk = random.integer(0, 1) == 0;
  spec.short_tables = random.integer(0, 2) == 0;
  spec.strided = random.integer(0, 2) == 0;
  spec.tile_tokens = pick(&random, kTiles);
  spec.seqs.clear();
  for (int64_t n = random.integer(1, 5); n > 0; --n) {
    SeqSpec seq{pick(&random, kCached), pick(&random, kRows)};
    if (random.integer(0, 9) == 0) seq.cached_len = -std::min<int64_t>(seq.q_len, 2);
    spec.seqs.push_back(seq);
  }
  return spec;
}

}  // namespace kvtile::testing
