// The oracle itself, against answers worked out by hand: nothing here runs the engine.
#include "src/attention/reference.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "src/codec/codebook.h"
#include "tests/testing/cases.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::double_to_half;
using testing::format_names;
using testing::make_format;
using testing::SlotContent;
using testing::write_slot;

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Row {
  std::vector<double> out;
  double lse;
};

Row reference_row(const AttendProblem& problem, int64_t row, int head) {
  Row result{std::vector<double>(static_cast<size_t>(problem.spec.head_dim)), 0};
  reference_attend_row(problem.call, row, head, result.out.data(), &result.lse);
  return result;
}

// A slot whose key is zero and whose value is constant.
SlotContent constant_slot(const SlotFormat& format, double value) {
  SlotContent content;
  content.key_codes.assign(static_cast<size_t>(format.head_dim), 0);
  content.value_codes.assign(static_cast<size_t>(format.head_dim), 0);
  content.zero = double_to_half(value);
  return content;
}

void fill_constant(AttendProblem* problem, double (*value)(int64_t position, int head)) {
  for (int s = 0; s < problem->num_seqs(); ++s) {
    for (int64_t p = problem->packed_begin(s); p < problem->packed_end(s); ++p) {
      for (int h = 0; h < problem->spec.num_kv_heads; ++h) {
        write_slot(problem->call.cache.format,
                   constant_slot(problem->call.cache.format, value(p, h)), problem->slot(s, p, h));
      }
    }
  }
}

TEST(Reference, DecodesASlotWrittenByHand) {
  const SlotFormat format = make_format("4bit_nc", 32);
  SlotContent content;
  for (int d = 0; d < 32; ++d) {
    content.key_codes.push_back(d % 16);
    content.value_codes.push_back(15 - d % 16);
  }
  content.norm = 0x4200;   // 3
  content.scale = 0x3800;  // 0.5
  content.zero = 0xC000;   // -2
  std::vector<std::byte> slot(static_cast<size_t>(format.slot_bytes()));
  write_slot(format, content, slot.data());
  std::vector<double> key(32), value(32);
  reference_decode_slot(format, slot.data(), key.data(), value.data());
  const Codebook book = make_codebook(format.key, 32);
  double squares = 0, total = 0;
  for (int d = 0; d < 32; ++d) {
    const auto level = static_cast<double>(book.levels[d % 16]);
    squares += level * level;
  }
  for (int d = 0; d < 32; ++d) {
    const auto n = static_cast<size_t>(d);
    EXPECT_NEAR(key[n], 3 * static_cast<double>(book.levels[d % 16]) / std::sqrt(squares), 1e-15);
    EXPECT_EQ(value[n], 0.5 * (15 - d % 16) - 2);
    total += key[n] * key[n];
  }
  EXPECT_NEAR(std::sqrt(total), 3, 1e-12);
}

TEST(Reference, HadamardIsSylvestersAndItsOwnInverse) {
  for (int n : {1, 2, 32, 128, 512}) {
    testing::Random random(static_cast<uint64_t>(n));
    std::vector<double> x(static_cast<size_t>(n)), y;
    for (double& v : x) v = random.normal();
    y = x;
    reference_hadamard(y.data(), n);
    for (int i = 0; i < n; ++i) {
      double sum = 0;
      for (int j = 0; j < n; ++j) {
        const double v = x[static_cast<size_t>(j)];
        sum += std::popcount(static_cast<unsigned>(i & j)) % 2 == 1 ? -v : v;
      }
      EXPECT_NEAR(y[static_cast<size_t>(i)], sum / std::sqrt(n), 1e-12);
    }
    reference_hadamard(y.data(), n);
    for (int i = 0; i < n; ++i) {
      EXPECT_NEAR(y[static_cast<size_t>(i)], x[static_cast<size_t>(i)], 1e-12);
    }
  }
}

TEST(Reference, EqualScoresGiveTheMeanAndTheLogOfTheCount) {
  for (const auto& name : format_names()) {
    AttendSpec spec;
    spec.preset = name.preset;
    spec.fp8 = name.fp8;
    spec.seqs = {{10, 4}, {0, 2}};
    AttendProblem problem(spec);
    fill_constant(&problem, [](int64_t p, int h) { return p < 10 ? 1.0 + h : 0.0; });
    for (int head = 0; head < 4; ++head) {
      const double c = 1.0 + head / 2;
      for (int64_t r = 0; r < 4; ++r) {
        const Row row = reference_row(problem, r, head);
        const auto count = static_cast<double>(10 + r + 1);
        EXPECT_NEAR(row.out[7], 10 * c / count, 1e-12);
        EXPECT_NEAR(row.lse, std::log(count), 1e-12);
      }
      EXPECT_NEAR(reference_row(problem, 5, head).out[0], c, 1e-12);
      EXPECT_NEAR(reference_row(problem, 5, head).lse, std::log(2), 1e-12);
    }
  }
}

TEST(Reference, WindowCountsTheRowItself) {
  AttendSpec spec;
  spec.seqs = {{20, 3}};
  spec.mask.window = 5;
  AttendProblem problem(spec);
  fill_constant(&problem, [](int64_t p, int) { return static_cast<double>(p); });
  for (int64_t r = 0; r < 3; ++r) {
    const Row row = reference_row(problem, r, 0);
    EXPECT_NEAR(row.lse, std::log(5), 1e-12);
    EXPECT_NEAR(row.out[0], static_cast<double>(20 + r - 2), 1e-12);
  }
}

TEST(Reference, FullMaskSeesTheWholeSequence) {
  AttendSpec spec;
  spec.seqs = {{20, 3}};
  spec.mask.causal = false;
  AttendProblem problem(spec);
  fill_constant(&problem, [](int64_t p, int) { return static_cast<double>(p); });
  for (int64_t r = 0; r < 3; ++r) {
    EXPECT_NEAR(reference_row(problem, r, 1).lse, std::log(23), 1e-12);
    EXPECT_NEAR(reference_row(problem, r, 1).out[3], 11.0, 1e-12);
  }
}

TEST(Reference, SinkTakesMassAndBelongsToTheLse) {
  AttendSpec spec;
  spec.seqs = {{6, 1}};
  spec.sinks = true;
  AttendProblem problem(spec);
  fill_constant(&problem, [](int64_t, int) { return 8.0; });
  for (int head = 0; head < 4; ++head) {
    const double sink = std::exp(static_cast<double>(problem.call.sinks[head]));
    const Row row = reference_row(problem, 0, head);
    EXPECT_NEAR(row.out[5], 8.0 * 7 / (7 + sink), 1e-12);
    EXPECT_NEAR(row.lse, std::log(7 + sink), 1e-12);
  }
}

TEST(Reference, RowsBeforeTheFirstTokenAreEmptyEvenWithSinks) {
  AttendSpec spec;
  spec.seqs = {{-2, 4}};
  spec.sinks = true;
  for (bool causal : {true, false}) {
    spec.mask.causal = causal;
    AttendProblem problem(spec);
    for (int64_t r = 0; r < 2; ++r) {
      const Row row = reference_row(problem, r, 0);
      EXPECT_EQ(row.lse, -kInf);
      for (double x : row.out) EXPECT_EQ(x, 0.0);
    }
    EXPECT_TRUE(std::isfinite(reference_row(problem, 2, 0).lse));
  }
}

TEST(Reference, RawKeysMeetTheUnrotatedQuery) {
  // One raw key beside one packed zero key: score 2 against score 0, softcap on top.
  for (float softcap : {0.0f, 1.5f}) {
    AttendSpec spec;
    spec.seqs = {{1, 1}};
    spec.raw_chunk = true;
    spec.softcap = softcap;
    AttendProblem problem(spec);
    fill_constant(&problem, [](int64_t, int) { return 0.0; });
    for (int d = 0; d < 64; ++d) {
      problem.set_query(0, 3, d, d == 9 ? 8.0 : 0.0);
      problem.set_chunk_key(0, 1, d, d == 9 ? 2.0 : 0.0);
      problem.set_chunk_value(0, 1, d, 1.0);
    }
    const double score = softcap > 0 ? 1.5 * std::tanh(2.0 / 1.5) : 2.0;
    const Row row = reference_row(problem, 0, 3);
    EXPECT_NEAR(row.out[63], std::exp(score) / (1 + std::exp(score)), 1e-12);
    EXPECT_NEAR(row.lse, std::log(1 + std::exp(score)), 1e-12);
  }
}

TEST(Reference, PackedKeysMeetTheRotatedQuery) {
  // The score of a packed key equals the plain dot product with the un-rotated decoded key.
  for (const char* preset : {"4bit_nc", "3bit_nc", "k8v4"}) {
    AttendSpec spec;
    spec.preset = preset;
    spec.seqs = {{0, 1}};
    AttendProblem problem(spec);
    std::vector<double> key(64);
    reference_decode_slot(problem.call.cache.format, problem.slot(0, 0, 0), key.data(), nullptr);
    if (problem.call.cache.format.rotated()) reference_hadamard(key.data(), 64);
    double dot = 0;
    for (int d = 0; d < 64; ++d) {
      dot += key[static_cast<size_t>(d)] * testing::load_element(problem.call.query, spec.dtype, d);
    }
    EXPECT_NEAR(reference_row(problem, 0, 0).lse, dot / 8, 1e-12);
  }
}

TEST(Reference, NonFiniteMetadataReachesTheRowsThatSeeIt) {
  AttendSpec spec;
  spec.seqs = {{4, 3}};
  const SlotFormat format = spec.format();
  const struct {
    int offset;
    bool lse_lost;
  } kFields[] = {
      {format.norm_offset(), true}, {format.scale_offset(), false}, {format.zero_offset(), false}};
  for (const auto& field : kFields) {
    for (uint16_t word : {uint16_t{0x7C00}, uint16_t{0xFC00}, uint16_t{0x7E00}}) {
      AttendProblem problem(spec);
      std::memcpy(problem.slot(0, 5, 1) + field.offset, &word, 2);
      for (int64_t r = 0; r < 3; ++r) {
        for (int head = 0; head < 4; ++head) {
          const Row row = reference_row(problem, r, head);
          const bool sees = r >= 1 && head >= 2;
          EXPECT_EQ(std::isfinite(row.out[0]), !sees);
          EXPECT_EQ(std::isnan(row.lse), sees && field.lse_lost);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtile
