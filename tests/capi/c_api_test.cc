// The C ABI: the same bits as the C++ calls, sizes that grow, null pointers in turn, and a last
// error that says what was wrong.
#include "kvtile/c_api.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "kvtile/codec.h"
#include "src/core/device.h"
#include "tests/capi/c_api_probe.h"
#include "tests/testing/cases.h"
#include "tests/testing/compare.h"

namespace kvtile {
namespace {

using testing::AttendProblem;
using testing::AttendSpec;
using testing::is_ok;
using testing::SentinelBuffer;

kvtile_cache c_cache(const PagedCache& cache) {
  kvtile_cache c = KVTILE_INIT(kvtile_cache);
  c.layout = static_cast<int32_t>(cache.layout);
  c.pages = cache.pages;
  c.pages_bytes = cache.pages_bytes;
  c.num_blocks = cache.num_blocks;
  c.block_size = cache.block_size;
  c.num_kv_heads = cache.num_kv_heads;
  c.stride_block = cache.stride_block;
  c.stride_token = cache.stride_token;
  c.stride_head = cache.stride_head;
  c.format = KVTILE_INIT(kvtile_format);
  c.format.head_dim = cache.format.head_dim;
  c.format.key = static_cast<int32_t>(cache.format.key);
  c.format.value = static_cast<int32_t>(cache.format.value);
  c.format.norm_correction = cache.format.norm_correction ? 1 : 0;
  return c;
}

kvtile_attention_call c_call(const AttentionCall& call) {
  kvtile_attention_call c = KVTILE_INIT(kvtile_attention_call);
  c.dtype = static_cast<int32_t>(call.dtype);
  c.query = call.query;
  c.out = call.out;
  c.lse = call.lse;
  c.num_seqs = call.num_seqs;
  c.num_heads = call.num_heads;
  c.total_q = call.total_q;
  c.softmax_scale = call.softmax_scale;
  c.softcap = call.softcap;
  c.sinks = call.sinks;
  c.causal = call.mask.causal ? 1 : 0;
  c.window = call.mask.window;
  c.cache = c_cache(call.cache);
  c.block_table = call.block_table;
  c.max_blocks = call.max_blocks;
  c.block_table_stride = call.block_table_stride;
  c.cu_seqlens_q = call.cu_seqlens_q;
  c.seq_lens = call.seq_lens;
  c.first_positions = call.first_positions;
  c.chunk_key = call.chunk_key;
  c.chunk_value = call.chunk_value;
  c.query_stride_token = call.query_stride_token;
  c.query_stride_head = call.query_stride_head;
  c.out_stride_token = call.out_stride_token;
  c.out_stride_head = call.out_stride_head;
  c.chunk_key_stride_token = call.chunk_key_stride_token;
  c.chunk_key_stride_head = call.chunk_key_stride_head;
  c.chunk_value_stride_token = call.chunk_value_stride_token;
  c.chunk_value_stride_head = call.chunk_value_stride_head;
  c.lse_stride_head = call.lse_stride_head;
  c.lse_stride_token = call.lse_stride_token;
  c.tile_tokens = call.tile_tokens;
  return c;
}

std::string last_error() { return kvtile_last_error(); }

TEST(CApi, EveryFieldOfAnAttentionCallArrives) {
  for (uint64_t seed = 900; seed < 960; ++seed) {
    const AttendSpec spec = testing::random_spec(seed);
    AttendProblem cpp(spec), c(spec);
    ASSERT_TRUE(is_ok(cpp.run()));
    kvtile_attention_call call = c_call(c.call);
    ASSERT_EQ(kvtile_workspace_bytes(&call, &call.workspace_bytes), KVTILE_OK) << last_error();
    size_t bytes = 0;
    ASSERT_TRUE(is_ok(workspace_bytes(c.call, {}, &bytes)));
    EXPECT_EQ(call.workspace_bytes, bytes);
    SentinelBuffer workspace(bytes);
    call.workspace = workspace.data();
    kvtile_run_report report = KVTILE_INIT(kvtile_run_report);
    ASSERT_EQ(kvtile_attend(&call, &report), KVTILE_OK) << last_error();
    EXPECT_EQ(last_error(), "");
    EXPECT_TRUE(testing::same_bits(c.all_bits(), cpp.all_bits())) << testing::describe(spec);
    EXPECT_EQ(report.workspace_bytes, bytes);
    EXPECT_GE(report.num_threads, 1);
    ASSERT_NE(report.backend, nullptr);
    EXPECT_EQ(std::string(report.backend).substr(0, 3), "cpu");
  }
}

TEST(CApi, ACProgramStoresAndAttends) {
  constexpr int kTokens = 50;
  AttendSpec spec;
  spec.layout = PageLayout::kHeadMajor;
  spec.seqs = {{kTokens - 1, 1}};
  AttendProblem problem(spec);
  testing::Random random(3);
  std::vector<float> key(kTokens * 2 * 64), value(key.size()), query(4 * 64), out(4 * 64), lse(4);
  for (float& x : key) x = static_cast<float>(random.normal());
  for (float& x : value) x = static_cast<float>(random.normal());
  for (float& x : query) x = static_cast<float>(random.normal());
  ASSERT_EQ(kvtile_probe(key.data(), value.data(), query.data(), kTokens, out.data(), lse.data()),
            KVTILE_OK)
      << last_error();
  const auto at = [](const std::vector<float>& x, int64_t p, int h, int d) {
    return static_cast<double>(x[static_cast<size_t>((p * 2 + h) * 64 + d)]);
  };
  ASSERT_TRUE(is_ok(problem.store(
      DType::kFloat32, [&](int, int64_t p, int h, int d) { return at(key, p, h, d); },
      [&](int, int64_t p, int h, int d) { return at(value, p, h, d); })));
  for (int h = 0; h < 4; ++h) {
    for (int d = 0; d < 64; ++d) {
      problem.set_query(0, h, d, static_cast<double>(query[static_cast<size_t>(h * 64 + d)]));
    }
  }
  ASSERT_TRUE(is_ok(problem.run()));
  for (int h = 0; h < 4; ++h) {
    EXPECT_EQ(lse[static_cast<size_t>(h)], problem.lse(0, h));
    for (int d = 0; d < 64; ++d) {
      EXPECT_EQ(out[static_cast<size_t>(h * 64 + d)], problem.out(0, h, d));
    }
  }
}

TEST(CApi, EncodeDecodeAndReport) {
  const SlotFormat format = testing::make_format("k3v4_nc", 64);
  std::vector<std::byte> pages(static_cast<size_t>(4 * format.slot_bytes())), again = pages;
  testing::Random random(8);
  std::vector<float> key(4 * 64), value(4 * 64);
  for (float& x : key) x = static_cast<float>(random.normal());
  for (float& x : value) x = static_cast<float>(random.normal());
  key[70] = std::numeric_limits<float>::quiet_NaN();
  value[5] = 1e6f;
  const std::vector<int64_t> slots = {2, 0, -1, 1};
  kvtile_encode_call encode = KVTILE_INIT(kvtile_encode_call);
  encode.dtype = KVTILE_FLOAT32;
  encode.key = key.data();
  encode.value = value.data();
  encode.num_tokens = 4;
  encode.slot_mapping = slots.data();
  encode.cache = c_cache(make_cache(pages.data(), 4, 1, 1, format));
  kvtile_encode_report report = KVTILE_INIT(kvtile_encode_report);
  for (int round = 1; round <= 2; ++round) {
    ASSERT_EQ(kvtile_encode(&encode, &report), KVTILE_OK) << last_error();
    EXPECT_EQ(report.tokens, 3 * round);
    EXPECT_EQ(report.skipped, round);
    EXPECT_EQ(report.non_finite_keys, round);
    EXPECT_EQ(report.value_elements_clamped, round);
    EXPECT_EQ(report.size, sizeof(report));
  }
  ASSERT_EQ(kvtile_encode(&encode, nullptr), KVTILE_OK);
  EncodeCall cpp;
  cpp.key = key.data();
  cpp.value = value.data();
  cpp.dtype = DType::kFloat32;
  cpp.num_tokens = 4;
  cpp.slot_mapping = slots.data();
  cpp.cache = make_cache(again.data(), 4, 1, 1, format);
  ASSERT_TRUE(is_ok(encode_slots(cpp)));
  EXPECT_TRUE(testing::same_bits(pages, again));
  encode.checked = 1;
  EXPECT_EQ(kvtile_encode(&encode, &report), KVTILE_VALUE_OVERFLOW);
  EXPECT_NE(last_error().find("token 0"), std::string::npos) << last_error();

  for (int unrotate : {0, 1}) {
    std::vector<float> got_key(4 * 64), got_value(4 * 64), want_key(4 * 64), want_value(4 * 64);
    kvtile_decode_call decode = KVTILE_INIT(kvtile_decode_call);
    decode.dtype = KVTILE_FLOAT32;
    decode.cache = encode.cache;
    decode.slot_mapping = slots.data();
    decode.num_tokens = 4;
    decode.key = got_key.data();
    decode.value = got_value.data();
    decode.unrotate_keys = unrotate;
    ASSERT_EQ(kvtile_decode(&decode), KVTILE_OK) << last_error();
    DecodeCall want;
    want.cache = cpp.cache;
    want.slot_mapping = slots.data();
    want.num_tokens = 4;
    want.key = want_key.data();
    want.value = want_value.data();
    want.unrotate_keys = unrotate == 1;
    ASSERT_TRUE(is_ok(decode_slots(want)));
    EXPECT_EQ(std::memcmp(got_key.data(), want_key.data(), 4 * 64 * 4), 0);
    EXPECT_EQ(std::memcmp(got_value.data(), want_value.data(), 4 * 64 * 4), 0);
  }
}

TEST(CApi, Merge) {
  std::vector<float> a = {1, 2, 3, 4}, b = {3, 4, 5, 6}, out(4);
  const float lse_a = 0.0f, lse_b = 0.0f;
  float lse = 0;
  kvtile_partial_state states[2] = {KVTILE_INIT(kvtile_partial_state),
                                    KVTILE_INIT(kvtile_partial_state)};
  states[0].out = a.data();
  states[0].lse = &lse_a;
  states[1].out = b.data();
  states[1].lse = &lse_b;
  kvtile_merge_call merge = KVTILE_INIT(kvtile_merge_call);
  merge.states = states;
  merge.num_states = 2;
  merge.total_q = 1;
  merge.num_heads = 1;
  merge.head_dim = 4;
  merge.out = out.data();
  merge.lse = &lse;
  ASSERT_EQ(kvtile_merge(&merge), KVTILE_OK) << last_error();
  EXPECT_EQ(out, (std::vector<float>{2, 3, 4, 5}));
  EXPECT_NEAR(lse, std::log(2.0), 1e-6);
  merge.states = nullptr;
  EXPECT_EQ(kvtile_merge(&merge), KVTILE_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("states"), std::string::npos);
  merge.states = states;
  states[1].size = 3;
  EXPECT_EQ(kvtile_merge(&merge), KVTILE_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("states[1].size"), std::string::npos) << last_error();
}

TEST(CApi, EachPointerNullInTurnMeansItsDefaultOrAnError) {
  AttendSpec spec;
  spec.raw_chunk = true;
  spec.sinks = true;
  spec.short_tables = true;
  AttendProblem problem(spec);
  size_t bytes = 0;
  ASSERT_TRUE(is_ok(workspace_bytes(problem.call, {}, &bytes)));
  SentinelBuffer workspace(bytes);
  kvtile_attention_call good = c_call(problem.call);
  good.workspace = workspace.data();
  good.workspace_bytes = bytes;
  const auto refused = [&](const char* argument, auto change) {
    kvtile_attention_call call = good;
    change(&call);
    EXPECT_EQ(kvtile_attend(&call, nullptr), KVTILE_INVALID_ARGUMENT) << argument;
    EXPECT_NE(last_error().find(argument), std::string::npos) << last_error();
    EXPECT_TRUE(problem.outputs_untouched()) << argument;
  };
  refused("query", [](kvtile_attention_call* c) { c->query = nullptr; });
  refused("out", [](kvtile_attention_call* c) { c->out = nullptr; });
  refused("pages", [](kvtile_attention_call* c) { c->cache.pages = nullptr; });
  refused("block_table", [](kvtile_attention_call* c) { c->block_table = nullptr; });
  refused("cu_seqlens_q", [](kvtile_attention_call* c) { c->cu_seqlens_q = nullptr; });
  refused("seq_lens", [](kvtile_attention_call* c) { c->seq_lens = nullptr; });
  refused("chunk_key", [](kvtile_attention_call* c) { c->chunk_key = nullptr; });
  refused("chunk_value", [](kvtile_attention_call* c) { c->chunk_value = nullptr; });
  refused("workspace", [](kvtile_attention_call* c) { c->workspace = nullptr; });
  EXPECT_EQ(kvtile_attend(nullptr, nullptr), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_workspace_bytes(&good, nullptr), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_encode(nullptr, nullptr), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_decode(nullptr), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_merge(nullptr), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_backend_supports(nullptr, &good), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_backend_supports("cpu", nullptr), KVTILE_INVALID_ARGUMENT);

  // Optional ones change exactly what they say: each run is held against the oracle told the same.
  const auto defaulted = [&](auto change_c, auto change_cpp) {
    AttendProblem variant(spec);
    kvtile_attention_call call = c_call(variant.call);
    call.workspace = workspace.data();
    call.workspace_bytes = bytes;
    change_c(&call);
    change_cpp(&variant.call);
    ASSERT_EQ(kvtile_attend(&call, nullptr), KVTILE_OK) << last_error();
    EXPECT_TRUE(testing::matches_reference(variant));
  };
  defaulted([](kvtile_attention_call* c) { c->lse = nullptr; },
            [](AttentionCall* c) { c->lse = nullptr; });
  defaulted([](kvtile_attention_call* c) { c->sinks = nullptr; },
            [](AttentionCall* c) { c->sinks = nullptr; });
  defaulted([](kvtile_attention_call* c) { c->first_positions = nullptr; },
            [](AttentionCall* c) { c->first_positions = nullptr; });
  defaulted([](kvtile_attention_call* c) { c->backend = "cpu"; }, [](AttentionCall*) {});
}

TEST(CApi, SizesAreChecked) {
  AttendSpec spec;
  AttendProblem problem(spec);
  kvtile_attention_call call = c_call(problem.call);
  size_t bytes = 0;
  for (uint32_t size : {uint32_t{0}, uint32_t{3}, static_cast<uint32_t>(sizeof(call) + 1),
                        std::numeric_limits<uint32_t>::max()}) {
    call.size = size;
    EXPECT_EQ(kvtile_workspace_bytes(&call, &bytes), KVTILE_INVALID_ARGUMENT) << size;
    EXPECT_NE(last_error().find("size"), std::string::npos);
    EXPECT_NE(last_error().find(std::to_string(size)), std::string::npos) << last_error();
  }
  // An older caller's shorter struct: what it does not have reads as zero.
  call = c_call(problem.call);
  call.backend = "nonsense an older caller never wrote";
  call.size = offsetof(kvtile_attention_call, backend);
  EXPECT_EQ(kvtile_workspace_bytes(&call, &bytes), KVTILE_OK) << last_error();
  // Run options that an older caller never had: the device is then the current one.
  call = c_call(problem.call);
  call.device_plus_one = 77;
  EXPECT_EQ(kvtile_workspace_bytes(&call, &bytes), KVTILE_OK) << "the CPU has no device";
  call = c_call(problem.call);
  call.cache.size = 0;
  EXPECT_EQ(kvtile_workspace_bytes(&call, &bytes), KVTILE_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("cache.size"), std::string::npos);
  call = c_call(problem.call);
  call.cache.format.size = 1;
  EXPECT_EQ(kvtile_workspace_bytes(&call, &bytes), KVTILE_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("format.size"), std::string::npos);
}

TEST(CApi, ReportsOfOlderCallersAreNotOverrun) {
  struct {
    kvtile_run_report report;
    uint64_t guard;
  } small = {KVTILE_INIT(kvtile_run_report), 0x1234567812345678ull};
  AttendSpec spec;
  AttendProblem problem(spec);
  kvtile_attention_call call = c_call(problem.call);
  ASSERT_EQ(kvtile_workspace_bytes(&call, &call.workspace_bytes), KVTILE_OK);
  SentinelBuffer workspace(call.workspace_bytes);
  call.workspace = workspace.data();
  small.report.size = offsetof(kvtile_run_report, workspace_bytes);
  small.report.workspace_bytes = 77;
  small.report.tile_tokens = 78;
  ASSERT_EQ(kvtile_attend(&call, &small.report), KVTILE_OK) << last_error();
  EXPECT_EQ(small.report.workspace_bytes, 77u);
  EXPECT_EQ(small.report.tile_tokens, 78);
  EXPECT_EQ(small.report.size, offsetof(kvtile_run_report, workspace_bytes));
  EXPECT_EQ(small.guard, 0x1234567812345678ull);
  small.report.size = sizeof(kvtile_run_report) + 8;
  EXPECT_EQ(kvtile_attend(&call, &small.report), KVTILE_INVALID_ARGUMENT);
}

TEST(CApi, EnumsOutOfRangeAreRefused) {
  AttendSpec spec;
  AttendProblem problem(spec);
  size_t bytes = 0;
  const auto refused = [&](const char* argument, auto change) {
    kvtile_attention_call call = c_call(problem.call);
    change(&call);
    EXPECT_EQ(kvtile_workspace_bytes(&call, &bytes), KVTILE_INVALID_ARGUMENT) << argument;
    EXPECT_NE(last_error().find(argument), std::string::npos) << last_error();
  };
  for (int bad : {-1, 4, 256, 1 << 20}) {
    refused("dtype", [&](kvtile_attention_call* c) { c->dtype = bad; });
    refused("layout", [&](kvtile_attention_call* c) { c->cache.layout = bad; });
    refused("format.key", [&](kvtile_attention_call* c) { c->cache.format.key = bad; });
    refused("format.value", [&](kvtile_attention_call* c) { c->cache.format.value = bad; });
  }
}

TEST(CApi, PresetsLayoutsAndDescriptors) {
  ASSERT_EQ(kvtile_num_presets(), 4);
  for (int i = 0; i < 4; ++i) {
    kvtile_format format = KVTILE_INIT(kvtile_format);
    ASSERT_EQ(kvtile_parse_preset(kvtile_preset_name(i), 128, KVTILE_KEY_FP8_E4B15, &format),
              KVTILE_OK);
    const SlotFormat want = testing::make_format(kvtile_preset_name(i), 128, KeyCode::kFp8E4B15);
    EXPECT_EQ(format.key, static_cast<int>(want.key));
    kvtile_slot_map map = KVTILE_INIT(kvtile_slot_map);
    ASSERT_EQ(kvtile_slot_layout(&format, &map), KVTILE_OK);
    EXPECT_EQ(map.slot_bytes, want.slot_bytes());
    EXPECT_EQ(map.key_bytes, want.key_bytes());
    EXPECT_EQ(map.norm_offset, want.rotated() ? want.norm_offset() : -1);
    EXPECT_EQ(map.value_offset, want.value_offset());
    EXPECT_EQ(map.scale_offset, want.scale_offset());
    EXPECT_EQ(map.zero_offset, want.zero_offset());
  }
  kvtile_format format = KVTILE_INIT(kvtile_format);
  EXPECT_EQ(kvtile_parse_preset("4bit_nc", 96, 0, &format), KVTILE_UNSUPPORTED);
  EXPECT_NE(last_error().find("96"), std::string::npos);
  EXPECT_EQ(kvtile_parse_preset("nope", 128, 0, &format), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_parse_preset(nullptr, 128, 0, &format), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_parse_preset("k8v4", 128, 2, &format), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_parse_preset("k8v4", 128, 0, nullptr), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(format.head_dim, 0);

  std::byte page{};
  const PagedCache cache = make_cache(&page, 4, 16, 2, testing::make_format("4bit_nc", 64));
  const kvtile_cache c = c_cache(cache);
  size_t needed = 0;
  ASSERT_EQ(kvtile_cache_descriptor(&c, nullptr, 0, &needed), KVTILE_OK) << last_error();
  std::string text(needed, 'x');
  EXPECT_EQ(kvtile_cache_descriptor(&c, text.data(), needed - 1, &needed), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(text, std::string(needed, 'x'));
  ASSERT_EQ(kvtile_cache_descriptor(&c, text.data(), needed, nullptr), KVTILE_OK);
  EXPECT_EQ(std::string(text.c_str()), cache_descriptor(cache));
  EXPECT_EQ(kvtile_match_descriptor(&c, text.c_str()), KVTILE_OK);
  kvtile_cache other = c;
  other.block_size = 8;
  EXPECT_EQ(kvtile_match_descriptor(&other, text.c_str()), KVTILE_INVALID_ARGUMENT);
  EXPECT_EQ(kvtile_match_descriptor(&c, nullptr), KVTILE_INVALID_ARGUMENT);
}

TEST(CApi, LastErrorBelongsToItsThreadAndClears) {
  kvtile_format format = KVTILE_INIT(kvtile_format);
  EXPECT_NE(kvtile_parse_preset("nope", 128, 0, &format), KVTILE_OK);
  EXPECT_NE(last_error(), "");
  std::string elsewhere = "unset";
  std::thread([&] { elsewhere = kvtile_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_EQ(kvtile_parse_preset("4bit_nc", 128, 0, &format), KVTILE_OK);
  EXPECT_EQ(last_error(), "");
}

TEST(CApi, Names) {
  EXPECT_STREQ(kvtile_version(), version());
  EXPECT_EQ(kvtile_abi_version(), KVTILE_ABI_VERSION);
  for (int code = 0; code <= 7; ++code) {
    EXPECT_STRNE(kvtile_status_name(static_cast<kvtile_status>(code)), "unknown status");
  }
  EXPECT_EQ(kvtile_num_backends(), num_backends());
  EXPECT_STREQ(kvtile_backend_name(kvtile_num_backends() - 1), "cpu");
}

TEST(CApi, Devices) {
  EXPECT_EQ(kvtile_num_devices(), num_devices());
  kvtile_device device = KVTILE_INIT(kvtile_device);
  EXPECT_NE(kvtile_device_info(-1, &device), KVTILE_OK);
  EXPECT_NE(kvtile_device_info(kvtile_num_devices(), &device), KVTILE_OK);
  EXPECT_NE(last_error().find("device"), std::string::npos) << last_error();
  EXPECT_EQ(kvtile_device_info(0, nullptr), KVTILE_INVALID_ARGUMENT);
  for (int i = 0; i < kvtile_num_devices(); ++i) {
    ASSERT_EQ(kvtile_device_info(i, &device), KVTILE_OK) << last_error();
    EXPECT_EQ(device.size, sizeof(device));
    EXPECT_GE(device.arch, 80);
    EXPECT_GT(device.num_sms, 0);
    EXPECT_GT(device.copy_gb_per_s, 0.0);
    EXPECT_STRNE(device.name, "");
  }
  if (kvtile_num_devices() > 0) return;
  kvtile_decode_call decode = KVTILE_INIT(kvtile_decode_call);
  decode.cache = KVTILE_INIT(kvtile_cache);
  decode.cache.format = KVTILE_INIT(kvtile_format);
  ASSERT_EQ(kvtile_parse_preset("4bit_nc", 128, 0, &decode.cache.format), KVTILE_OK);
  decode.cache.block_size = 16;
  decode.cache.num_kv_heads = 1;
  decode.backend = "cuda";
  decode.device_plus_one = 1;
  EXPECT_EQ(kvtile_decode(&decode), KVTILE_UNAVAILABLE);
  EXPECT_NE(last_error().find("backend: got cuda"), std::string::npos) << last_error();
}

// The numbers of the two enumerations are one list.
static_assert(KVTILE_UNAVAILABLE == static_cast<int>(StatusCode::kUnavailable));
static_assert(KVTILE_WORKSPACE_TOO_SMALL == static_cast<int>(StatusCode::kWorkspaceTooSmall));
static_assert(KVTILE_NON_FINITE == static_cast<int>(StatusCode::kNonFinite));
static_assert(KVTILE_KEY_LLOYD_MAX3 == static_cast<int>(KeyCode::kLloydMax3));
static_assert(KVTILE_VALUE_UNIFORM3 == static_cast<int>(ValueCode::kUniform3));
static_assert(KVTILE_BFLOAT16 == static_cast<int>(DType::kBFloat16));
static_assert(KVTILE_STRIDED == static_cast<int>(PageLayout::kStrided));

}  // namespace
}  // namespace kvtile
