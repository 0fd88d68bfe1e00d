// encode_slots and decode_slots on the GPU against the CPU, bit for bit: every format, dtype and
// page layout the backend serves, awkward rows, hostile slots, graph replay, and typed refusals.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kvtile/codec.h"
#include "src/core/float16.h"
#include "tests/cuda/device_buffer.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile {
namespace {

using testing::DeviceBuffer;
using testing::fails_with;
using testing::format_names;
using testing::FormatName;
using testing::is_ok;
using testing::make_format;
using testing::Random;

constexpr int kHeadDims[] = {64, 128, 256};
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
const RunOptions kCuda = {"cuda", 0, nullptr};

enum class Layout { kTokenMajor, kHeadMajor, kPadded };

PagedCache layout_cache(Layout layout, int64_t num_blocks, int block_size, int heads,
                        const SlotFormat& format) {
  switch (layout) {
    case Layout::kTokenMajor:
      return make_cache(nullptr, num_blocks, block_size, heads, format, PageLayout::kTokenMajor);
    case Layout::kHeadMajor:
      return make_cache(nullptr, num_blocks, block_size, heads, format, PageLayout::kHeadMajor);
    case Layout::kPadded:
      // Slots two bytes apart, pages six: every alignment a slot can have.
      PagedCache cache = make_cache(nullptr, num_blocks, block_size, heads, format,
                                    PageLayout::kHeadMajor, format.slot_bytes() + 2);
      cache.stride_block += 6;
      cache.pages_bytes = cache.stride_block * num_blocks;
      cache.layout = PageLayout::kStrided;
      return cache;
  }
  return {};
}

// Rows that go wrong first: zeros of both signs, extremes, non-finite, constant, subnormal.
void plant_awkward_rows(std::vector<std::byte>* array, DType dtype, int head_dim) {
  const auto row = [&](int64_t r, auto&& element) {
    for (int d = 0; d < head_dim; ++d) {
      if ((r + 1) * head_dim * dtype_bytes(dtype) > static_cast<int64_t>(array->size())) return;
      store_element(array->data(), r * head_dim + d, dtype, element(d));
    }
  };
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float largest = dtype == DType::kFloat16 ? 65504.0f : 3e38f;
  row(0, [](int) { return 0.0f; });
  row(1, [](int) { return -0.0f; });
  row(2, [](int d) { return d % 2 == 0 ? 0.0f : -0.0f; });
  row(3, [](int) { return 0.37f; });
  row(4, [&](int d) { return d == 5 ? nan : 1.0f; });
  row(5, [&](int d) { return d == 6 ? inf : 1.0f; });
  row(6, [&](int d) { return d == 7 ? -inf : 1.0f; });
  row(7, [&](int d) { return d % 3 == 0 ? largest : -largest; });
  row(8, [&](int d) { return d == 0 ? largest : 0.0f; });
  row(9, [](int d) { return d == 9 ? 1.0f : 0.0f; });
  row(10, [](int d) { return static_cast<float>(d - 20) * 1e-7f; });
  row(11, [](int d) { return static_cast<float>(d % 7) * 6e-8f; });
  row(12, [](int d) { return d % 2 == 0 ? 1e-40f : -1e-39f; });
  row(13, [](int d) { return static_cast<float>(d) * 7.0f; });
  row(14, [](int d) { return 0.0625f * static_cast<float>(d % 5 - 2); });
  row(15, [&](int d) { return d % 2 == 0 ? nan : -nan; });
  row(16, [](int d) { return std::ldexp(1.0f + static_cast<float>(d % 8) / 16, d % 30 - 20); });
  row(17, [](int d) { return d == 0 ? 70000.0f : -70000.0f; });
  row(18, [](int d) { return (d % 2 == 0 ? 1.0f : -1.0f) * 1e20f; });
}

std::vector<std::byte> random_rows(int64_t rows, int head_dim, DType dtype, Random* random) {
  std::vector<std::byte> array(static_cast<size_t>(rows * head_dim * dtype_bytes(dtype)));
  for (int64_t i = 0; i < rows * head_dim; ++i) {
    store_element(array.data(), i, dtype, static_cast<float>(random->normal()));
  }
  plant_awkward_rows(&array, dtype, head_dim);
  return array;
}

std::string label(const FormatName& name, int head_dim, DType dtype, Layout layout) {
  return testing::format_label(name, head_dim) + " " + dtype_name(dtype) + " layout " +
         std::to_string(static_cast<int>(layout));
}

// A pool, a shuffled slot mapping with skipped entries, and raw rows; encoded on both sides.
struct EncodeProblem {
  EncodeProblem(const SlotFormat& format, DType dtype, Layout layout, int block_size, int heads,
                int64_t tokens, uint64_t seed)
      : random(seed) {
    const int64_t num_blocks = tokens / block_size + 3;
    call.cache = layout_cache(layout, num_blocks, block_size, heads, format);
    pages.assign(static_cast<size_t>(call.cache.pages_bytes), std::byte{DeviceBuffer::kPattern});
    key = random_rows(tokens * heads, format.head_dim, dtype, &random);
    value = random_rows(tokens * heads, format.head_dim, dtype, &random);
    std::vector<int64_t> all(static_cast<size_t>(num_blocks * block_size));
    std::iota(all.begin(), all.end(), 0);
    for (size_t i = all.size() - 1; i > 0; --i) {
      std::swap(all[i], all[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i)))]);
    }
    slots.assign(all.begin(), all.begin() + tokens);
    for (size_t i = 23; i < slots.size(); i += 29) slots[i] = -1;
    call.dtype = dtype;
    call.num_tokens = tokens;
    call.key = key.data();
    call.value = value.data();
    call.slot_mapping = slots.data();
    call.cache.pages = pages.data();
  }

  EncodeCall device_call() {
    device_pages = DeviceBuffer(pages.size());
    device_key = DeviceBuffer(key);
    device_value = DeviceBuffer(value);
    device_slots = DeviceBuffer(slots);
    EncodeCall device = call;
    device.key = device_key.as<>();
    device.value = device_value.as<>();
    device.slot_mapping = device_slots.as<int64_t>();
    device.cache.pages = device_pages.as<>();
    return device;
  }

  Random random;
  std::vector<std::byte> pages, key, value;
  std::vector<int64_t> slots;
  EncodeCall call;
  DeviceBuffer device_pages, device_key, device_value, device_slots;
};

::testing::AssertionResult same_pages(const std::vector<std::byte>& got,
                                      const std::vector<std::byte>& expected,
                                      const PagedCache& cache) {
  size_t different = 0;
  std::string first;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) continue;
    if (different++ == 0) {
      const auto at = static_cast<int64_t>(i);
      first = fmt::format(
          "byte {} (block {}, byte {} of it; slot is {} bytes): got {:02x}, CPU {:02x}", i,
          at / cache.stride_block, at % cache.stride_block, cache.format.slot_bytes(),
          static_cast<int>(got[i]), static_cast<int>(expected[i]));
    }
  }
  if (different == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << different << " bytes differ, first " << first;
}

TEST(CudaEncode, WritesTheCpuBytes) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : kHeadDims) {
      const SlotFormat format = make_format(name.preset, head_dim, name.fp8);
      for (DType dtype : kDTypes) {
        for (Layout layout : {Layout::kTokenMajor, Layout::kHeadMajor, Layout::kPadded}) {
          SCOPED_TRACE(label(name, head_dim, dtype, layout));
          EncodeProblem problem(format, dtype, layout, layout == Layout::kPadded ? 7 : 16,
                                layout == Layout::kHeadMajor ? 8 : 3, 401, 11);
          ASSERT_TRUE(is_ok(encode_slots(problem.call)));
          ASSERT_TRUE(is_ok(encode_slots(problem.device_call(), nullptr, kCuda)));
          EXPECT_TRUE(
              same_pages(problem.device_pages.download(), problem.pages, problem.call.cache));
          EXPECT_TRUE(problem.device_pages.margins_intact());
        }
      }
    }
  }
}

TEST(CudaEncode, ManyRandomRows) {
  for (const FormatName& name : format_names()) {
    SCOPED_TRACE(name.preset);
    EncodeProblem problem(make_format(name.preset, 128, name.fp8), DType::kBFloat16,
                          Layout::kTokenMajor, 784, 8, 20000, 12);
    ASSERT_TRUE(is_ok(encode_slots(problem.call)));
    ASSERT_TRUE(is_ok(encode_slots(problem.device_call(), nullptr, kCuda)));
    EXPECT_TRUE(same_pages(problem.device_pages.download(), problem.pages, problem.call.cache));
  }
}

TEST(CudaEncode, StridedRows) {
  // Key and value are slices of one wider array, as a fused projection leaves them.
  const SlotFormat format = make_format("4bit_nc", 128);
  EncodeProblem problem(format, DType::kBFloat16, Layout::kTokenMajor, 16, 2, 130, 13);
  const int64_t row = 2 * 2 * 128 + 64;
  std::vector<uint16_t> fused(static_cast<size_t>(130 * row));
  for (auto& word : fused) word = float_to_bfloat(static_cast<float>(problem.random.normal()));
  EncodeCall call = problem.call;
  call.key = fused.data();
  call.value = fused.data() + 256;
  call.key_stride_token = call.value_stride_token = row;
  ASSERT_TRUE(is_ok(encode_slots(call)));
  DeviceBuffer device_fused(fused);
  EncodeCall device = problem.device_call();
  device.key = device_fused.as<>();
  device.value = device_fused.as<>() + 512;
  device.key_stride_token = device.value_stride_token = row;
  ASSERT_TRUE(is_ok(encode_slots(device, nullptr, kCuda)));
  EXPECT_TRUE(same_pages(problem.device_pages.download(), problem.pages, call.cache));
}

TEST(CudaEncode, SlotsOutsideThePoolAreSkipped) {
  EncodeProblem problem(make_format("3bit_nc", 64), DType::kFloat16, Layout::kTokenMajor, 16, 2, 96,
                        14);
  std::vector<int64_t> hostile = problem.slots;
  const int64_t limit = problem.call.cache.num_blocks * 16;
  hostile[3] = limit;
  hostile[4] = int64_t{1} << 40;
  hostile[5] = std::numeric_limits<int64_t>::max();
  hostile[6] = std::numeric_limits<int64_t>::min();
  for (int i = 3; i < 7; ++i) problem.slots[static_cast<size_t>(i)] = -1;
  ASSERT_TRUE(is_ok(encode_slots(problem.call)));
  problem.slots = hostile;
  ASSERT_TRUE(is_ok(encode_slots(problem.device_call(), nullptr, kCuda)));
  EXPECT_TRUE(same_pages(problem.device_pages.download(), problem.pages, problem.call.cache));
  EXPECT_TRUE(problem.device_pages.margins_intact());
}

bool is_nan_word(const std::byte* p, DType dtype) { return std::isnan(load_element(p, 0, dtype)); }

// Equal bits, but any NaN matches any NaN.
::testing::AssertionResult same_elements(const std::vector<std::byte>& got,
                                         const std::vector<std::byte>& expected, DType dtype) {
  const auto width = static_cast<size_t>(dtype_bytes(dtype));
  for (size_t i = 0; i < expected.size(); i += width) {
    if (std::memcmp(&got[i], &expected[i], width) == 0) continue;
    if (is_nan_word(&got[i], dtype) && is_nan_word(&expected[i], dtype)) continue;
    return ::testing::AssertionFailure()
           << "element " << i / width << ": got " << load_element(&got[i], 0, dtype) << ", CPU "
           << load_element(&expected[i], 0, dtype);
  }
  return ::testing::AssertionSuccess();
}

struct DecodeProblem {
  DecodeProblem(const SlotFormat& format, DType dtype, Layout layout, int block_size, int heads,
                int64_t tokens, uint64_t seed) {
    Random random(seed);
    call.cache = layout_cache(layout, 37, block_size, heads, format);
    pages.resize(static_cast<size_t>(call.cache.pages_bytes));
    for (auto& byte : pages) byte = static_cast<std::byte>(random.bits());
    for (int64_t t = 0; t < tokens; ++t) {
      slots.push_back(t % 31 == 30 ? -1 : random.integer(0, 37 * block_size - 1));
    }
    elements = static_cast<size_t>(tokens * heads * format.head_dim * dtype_bytes(dtype));
    key.resize(elements);
    value.resize(elements);
    call.cache.pages = pages.data();
    call.slot_mapping = slots.data();
    call.num_tokens = tokens;
    call.key = key.data();
    call.value = value.data();
    call.dtype = dtype;
  }
  DecodeCall device_call() {
    device_pages = DeviceBuffer(pages);
    device_slots = DeviceBuffer(slots);
    device_key = DeviceBuffer(elements);
    device_value = DeviceBuffer(elements);
    DecodeCall device = call;
    device.cache.pages = device_pages.as<>();
    device.slot_mapping = device_slots.as<int64_t>();
    device.key = device_key.as<>();
    device.value = device_value.as<>();
    return device;
  }
  std::vector<std::byte> pages, key, value;
  std::vector<int64_t> slots;
  size_t elements = 0;
  DecodeCall call;
  DeviceBuffer device_pages, device_slots, device_key, device_value;
};

TEST(CudaDecode, EveryByteAsOnTheCpu) {
  for (const FormatName& name : format_names()) {
    for (int head_dim : kHeadDims) {
      for (bool norm_correction : {true, false}) {
        SlotFormat format = make_format(name.preset, head_dim, name.fp8);
        if (!format.rotated() && norm_correction) continue;
        format.norm_correction = norm_correction;
        for (DType dtype : kDTypes) {
          for (Layout layout : {Layout::kTokenMajor, Layout::kHeadMajor, Layout::kPadded}) {
            for (bool unrotate : {false, true}) {
              if (unrotate && (layout != Layout::kTokenMajor || !norm_correction)) continue;
              SCOPED_TRACE(label(name, head_dim, dtype, layout) + (unrotate ? " unrotated" : ""));
              DecodeProblem problem(format, dtype, layout, layout == Layout::kPadded ? 5 : 16,
                                    layout == Layout::kHeadMajor ? 8 : 3, 203, 21);
              problem.call.unrotate_keys = unrotate;
              ASSERT_TRUE(is_ok(decode_slots(problem.call)));
              ASSERT_TRUE(is_ok(decode_slots(problem.device_call(), kCuda)));
              EXPECT_TRUE(same_elements(problem.device_key.download(), problem.key, dtype));
              EXPECT_TRUE(same_elements(problem.device_value.download(), problem.value, dtype));
              EXPECT_TRUE(problem.device_key.margins_intact());
              EXPECT_TRUE(problem.device_value.margins_intact());
            }
          }
        }
      }
    }
  }
}

TEST(CudaDecode, OneOfKeyAndValueAndASlice) {
  const SlotFormat format = make_format("4bit_nc", 128);
  DecodeProblem problem(format, DType::kFloat16, Layout::kTokenMajor, 16, 2, 200, 22);
  ASSERT_TRUE(is_ok(decode_slots(problem.call)));
  DecodeCall device = problem.device_call();
  device.value = nullptr;
  ASSERT_TRUE(is_ok(decode_slots(device, kCuda)));
  EXPECT_TRUE(same_elements(problem.device_key.download(), problem.key, DType::kFloat16));
  // Tokens 77.. alone decode to the same bits as in the whole.
  const size_t skip = size_t{77} * 2 * 128 * 2;
  DeviceBuffer part(problem.elements - skip);
  device.slot_mapping += 77;
  device.num_tokens -= 77;
  device.key = part.as<>();
  ASSERT_TRUE(is_ok(decode_slots(device, kCuda)));
  EXPECT_TRUE(same_elements(part.download(),
                            {problem.key.begin() + static_cast<int64_t>(skip), problem.key.end()},
                            DType::kFloat16));
  EXPECT_TRUE(part.margins_intact());
}

TEST(CudaDecode, SlotsOutsideThePoolAreNaN) {
  DecodeProblem problem(make_format("k8v4", 64), DType::kFloat32, Layout::kHeadMajor, 16, 2, 64,
                        23);
  ASSERT_TRUE(is_ok(decode_slots(problem.call)));
  problem.slots[9] = 37 * 16;
  problem.slots[10] = int64_t{1} << 50;
  ASSERT_TRUE(is_ok(decode_slots(problem.device_call(), kCuda)));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 9 * 2 * 64; i < 11 * 2 * 64; ++i) {
    store_element(problem.key.data(), i, DType::kFloat32, nan);
    store_element(problem.value.data(), i, DType::kFloat32, nan);
  }
  EXPECT_TRUE(same_elements(problem.device_key.download(), problem.key, DType::kFloat32));
  EXPECT_TRUE(same_elements(problem.device_value.download(), problem.value, DType::kFloat32));
}

TEST(CudaCodec, CapturedOnceReplayedOnNewContents) {
  const SlotFormat format = make_format("4bit_nc", 128);
  EncodeProblem first(format, DType::kBFloat16, Layout::kHeadMajor, 16, 4, 300, 31);
  EncodeProblem second(format, DType::kBFloat16, Layout::kHeadMajor, 16, 4, 300, 32);
  EncodeCall encode = first.device_call();
  const size_t bytes = size_t{300} * 4 * 128 * 2;
  DeviceBuffer key(bytes), value(bytes);
  DecodeCall decode;
  decode.cache = encode.cache;
  decode.slot_mapping = encode.slot_mapping;
  decode.num_tokens = 300;
  decode.key = key.as<>();
  decode.value = value.as<>();
  decode.dtype = DType::kBFloat16;

  cudaStream_t stream;
  KVTILE_CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const RunOptions options = {"cuda", 0, stream};
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  KVTILE_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(is_ok(encode_slots(encode, nullptr, options)));
  ASSERT_TRUE(is_ok(decode_slots(decode, options)));
  KVTILE_CUDA_OK(cudaStreamEndCapture(stream, &graph));
  KVTILE_CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));

  for (EncodeProblem* problem : {&first, &second}) {
    first.device_key.upload(problem->key.data());
    first.device_value.upload(problem->value.data());
    first.device_slots.upload(problem->slots.data());
    std::fill(problem->pages.begin(), problem->pages.end(), std::byte{DeviceBuffer::kPattern});
    first.device_pages.upload(problem->pages.data());
    ASSERT_TRUE(is_ok(encode_slots(problem->call)));
    std::vector<std::byte> expected_key(bytes), expected_value(bytes);
    DecodeCall host = decode;
    host.cache = problem->call.cache;
    host.slot_mapping = problem->slots.data();
    host.key = expected_key.data();
    host.value = expected_value.data();
    ASSERT_TRUE(is_ok(decode_slots(host)));
    KVTILE_CUDA_OK(cudaGraphLaunch(replay, stream));
    KVTILE_CUDA_OK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(same_pages(first.device_pages.download(), problem->pages, problem->call.cache));
    EXPECT_TRUE(same_elements(key.download(), expected_key, DType::kBFloat16));
    EXPECT_TRUE(same_elements(value.download(), expected_value, DType::kBFloat16));
  }
  KVTILE_CUDA_OK(cudaGraphExecDestroy(replay));
  KVTILE_CUDA_OK(cudaGraphDestroy(graph));
  KVTILE_CUDA_OK(cudaStreamDestroy(stream));
}

TEST(CudaCodec, RefusesWhatItCannotDo) {
  const SlotFormat format = make_format("4bit_nc", 128);
  EncodeProblem problem(format, DType::kBFloat16, Layout::kTokenMajor, 16, 2, 40, 41);
  const EncodeCall good = problem.device_call();
  const auto refused = [&](StatusCode code, const char* argument, auto&& change) {
    EncodeCall call = good;
    change(&call);
    EXPECT_TRUE(fails_with(encode_slots(call, nullptr, kCuda), code, argument));
  };
  EncodeReport report;
  EXPECT_TRUE(fails_with(encode_slots(good, &report, kCuda), StatusCode::kUnsupported, "report"));
  refused(StatusCode::kUnsupported, "checked", [](EncodeCall* c) { c->checked = true; });
  refused(StatusCode::kInvalidArgument, "key", [&](EncodeCall* c) { c->key = problem.key.data(); });
  refused(StatusCode::kInvalidArgument, "value",
          [&](EncodeCall* c) { c->value = problem.value.data(); });
  refused(StatusCode::kInvalidArgument, "slot_mapping",
          [&](EncodeCall* c) { c->slot_mapping = problem.slots.data(); });
  refused(StatusCode::kInvalidArgument, "slot_mapping",
          [&](EncodeCall* c) { c->slot_mapping = nullptr; });
  refused(StatusCode::kInvalidArgument, "pages",
          [&](EncodeCall* c) { c->cache.pages = problem.pages.data(); });
  refused(StatusCode::kUnsupported, "key",
          [](EncodeCall* c) { c->key = static_cast<const std::byte*>(c->key) + 2; });
  refused(StatusCode::kUnsupported, "pages", [](EncodeCall* c) {
    c->cache.pages += 1;
    c->cache.num_blocks -= 1;
  });
  refused(StatusCode::kUnsupported, "head_dim", [](EncodeCall* c) {
    c->cache = make_cache(c->cache.pages, 1, 1, 1, make_format("4bit_nc", 32));
  });
  EXPECT_TRUE(fails_with(encode_slots(good, nullptr, {"cuda:9", 0, nullptr}),
                         StatusCode::kUnavailable, "backend"));
  // Nothing was launched: the pool still holds its pattern.
  const std::vector<std::byte> pages = problem.device_pages.download();
  EXPECT_TRUE(std::all_of(pages.begin(), pages.end(),
                          [](std::byte b) { return b == std::byte{DeviceBuffer::kPattern}; }));
  EXPECT_TRUE(is_ok(encode_slots(good, nullptr, kCuda)));
}

}  // namespace
}  // namespace kvtile
