// The C ABI: checks struct sizes, copies fields into the C++ calls, keeps the last error text.
#include "kvtile/c_api.h"

#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "kvtile/attention.h"
#include "kvtile/cache.h"
#include "kvtile/codec.h"
#include "src/core/device.h"
#include "src/core/dtype.h"
#include "src/core/status.h"

namespace {

using kvtile::Status;
using kvtile::StatusCode;

thread_local std::string last_error;

kvtile_status finish(const Status& status) {
  if (status.ok()) {
    last_error.clear();
  } else {
    last_error = status.message();
  }
  return static_cast<kvtile_status>(status.code());
}

// No exception (an allocation that fails, say) crosses the ABI.
template <typename Body>
kvtile_status guarded(Body body) {
  try {
    return finish(body());
  } catch (const std::exception& e) {
    return finish(Status(StatusCode::kUnavailable, e.what()));
  }
}

// Copies a caller's struct that may be older (shorter): missing fields read as zero.
template <typename T>
Status read_struct(const char* name, const T* from, T* to) {
  if (from == nullptr) return kvtile::invalid(name, "null", "a struct");
  if (from->size < sizeof(uint32_t) || from->size > sizeof(T)) {
    return kvtile::invalid(fmt::format("{}.size", name), from->size,
                           fmt::format("sizeof in this ABI, {}", sizeof(T)));
  }
  std::memset(to, 0, sizeof(T));
  std::memcpy(to, from, from->size);
  return {};
}

// The same for a struct the library writes: only the bytes the caller has room for.
template <typename T>
Status check_output(const char* name, const T* out) {
  if (out->size < sizeof(uint32_t) || out->size > sizeof(T)) {
    return kvtile::invalid(fmt::format("{}.size", name), out->size,
                           fmt::format("sizeof in this ABI, {}", sizeof(T)));
  }
  return {};
}

template <typename T>
void write_struct(T value, T* out) {
  value.size = out->size;
  std::memcpy(out, &value, out->size);
}

Status to_format(const kvtile_format& in, kvtile::SlotFormat* out) {
  if (in.size != sizeof(kvtile_format)) {
    return kvtile::invalid("format.size", in.size, fmt::format("{}", sizeof(kvtile_format)));
  }
  if (in.key < 0 || in.key > KVTILE_KEY_LLOYD_MAX3) {
    return kvtile::invalid("format.key", in.key, "0..3");
  }
  if (in.value < 0 || in.value > KVTILE_VALUE_UNIFORM3) {
    return kvtile::invalid("format.value", in.value, "0..1");
  }
  *out = {in.head_dim, static_cast<kvtile::KeyCode>(in.key),
          static_cast<kvtile::ValueCode>(in.value), in.norm_correction != 0};
  return kvtile::check_format(*out);
}

Status to_cache(const kvtile_cache& in, kvtile::PagedCache* out) {
  if (in.size != sizeof(kvtile_cache)) {
    return kvtile::invalid("cache.size", in.size, fmt::format("{}", sizeof(kvtile_cache)));
  }
  kvtile::SlotFormat format;
  KVTILE_RETURN_IF_ERROR(to_format(in.format, &format));
  if (in.layout < 0 || in.layout > KVTILE_STRIDED) {
    return kvtile::invalid("cache.layout", in.layout, "0..2");
  }
  const auto layout = static_cast<kvtile::PageLayout>(in.layout);
  const bool dense = in.stride_block == 0 && in.stride_token == 0 && in.stride_head == 0;
  if (dense && layout == kvtile::PageLayout::kStrided) {
    return kvtile::invalid("cache.stride_*", 0, "byte strides for the strided layout");
  }
  *out = kvtile::make_cache(static_cast<std::byte*>(in.pages), in.num_blocks, in.block_size,
                            in.num_kv_heads, format, layout);
  if (!dense) {
    out->stride_block = in.stride_block;
    out->stride_token = in.stride_token;
    out->stride_head = in.stride_head;
  }
  out->pages_bytes = in.pages_bytes;
  return {};
}

// Every call struct carries the same run options under the same names.
template <typename Call>
kvtile::RunOptions run_options(const Call& call) {
  kvtile::RunOptions options;
  options.backend = call.backend;
  options.num_threads = call.num_threads;
  options.stream = call.stream;
  options.device = call.device_plus_one - 1;
  return options;
}

struct Attention {
  kvtile::AttentionCall call;
  kvtile::RunOptions options;
  kvtile::Workspace workspace;
};

Status to_attention(const kvtile_attention_call* original, Attention* out) {
  kvtile_attention_call in;
  KVTILE_RETURN_IF_ERROR(read_struct("attention_call", original, &in));
  kvtile::AttentionCall& call = out->call;
  KVTILE_RETURN_IF_ERROR(kvtile::to_dtype(in.dtype, &call.dtype));
  KVTILE_RETURN_IF_ERROR(to_cache(in.cache, &call.cache));
  call.query = in.query;
  call.out = in.out;
  call.lse = in.lse;
  call.num_seqs = in.num_seqs;
  call.total_q = in.total_q;
  call.num_heads = in.num_heads;
  call.softmax_scale = in.softmax_scale;
  call.softcap = in.softcap;
  call.sinks = in.sinks;
  call.mask.causal = in.causal != 0;
  call.mask.window = in.window;
  call.block_table = in.block_table;
  call.max_blocks = in.max_blocks;
  call.block_table_stride = in.block_table_stride;
  call.cu_seqlens_q = in.cu_seqlens_q;
  call.seq_lens = in.seq_lens;
  call.first_positions = in.first_positions;
  call.chunk_key = in.chunk_key;
  call.chunk_value = in.chunk_value;
  call.query_stride_token = in.query_stride_token;
  call.query_stride_head = in.query_stride_head;
  call.out_stride_token = in.out_stride_token;
  call.out_stride_head = in.out_stride_head;
  call.chunk_key_stride_token = in.chunk_key_stride_token;
  call.chunk_key_stride_head = in.chunk_key_stride_head;
  call.chunk_value_stride_token = in.chunk_value_stride_token;
  call.chunk_value_stride_head = in.chunk_value_stride_head;
  call.lse_stride_head = in.lse_stride_head;
  call.lse_stride_token = in.lse_stride_token;
  call.tile_tokens = in.tile_tokens;
  call.max_q_len = in.max_q_len;
  call.max_seq_len = in.max_seq_len;
  call.batch_invariant = in.batch_invariant != 0;
  out->options = run_options(in);
  out->workspace = {in.workspace, in.workspace_bytes};
  return {};
}

}  // namespace

extern "C" {

const char* kvtile_version(void) { return kvtile::version(); }
int kvtile_abi_version(void) { return KVTILE_ABI_VERSION; }
const char* kvtile_last_error(void) { return last_error.c_str(); }

const char* kvtile_status_name(kvtile_status status) {
  switch (status) {
    case KVTILE_OK:
      return "ok";
    case KVTILE_INVALID_ARGUMENT:
      return "invalid argument";
    case KVTILE_UNSUPPORTED:
      return "unsupported";
    case KVTILE_WORKSPACE_TOO_SMALL:
      return "workspace too small";
    case KVTILE_OUT_OF_RANGE:
      return "out of range";
    case KVTILE_VALUE_OVERFLOW:
      return "value overflow";
    case KVTILE_NON_FINITE:
      return "non-finite input";
    case KVTILE_UNAVAILABLE:
      return "unavailable";
  }
  return "unknown status";
}

int kvtile_num_presets(void) { return kvtile::num_presets(); }
const char* kvtile_preset_name(int index) { return kvtile::preset_name(index); }

kvtile_status kvtile_parse_preset(const char* name, int head_dim, int fp8, kvtile_format* format) {
  return guarded([&]() -> Status {
    if (name == nullptr) return kvtile::invalid("name", "null", "a preset name");
    if (format == nullptr) return kvtile::invalid("format", "null", "a struct");
    KVTILE_RETURN_IF_ERROR(check_output("format", format));
    if (fp8 != KVTILE_KEY_FP8_E4M3 && fp8 != KVTILE_KEY_FP8_E4B15) {
      return kvtile::invalid("fp8", fp8, "0 (e4m3) or 1 (e4b15)");
    }
    kvtile::SlotFormat parsed;
    KVTILE_RETURN_IF_ERROR(
        kvtile::parse_preset(name, head_dim, &parsed, static_cast<kvtile::KeyCode>(fp8)));
    kvtile_format out = KVTILE_INIT(kvtile_format);
    out.head_dim = parsed.head_dim;
    out.key = static_cast<int32_t>(parsed.key);
    out.value = static_cast<int32_t>(parsed.value);
    out.norm_correction = parsed.norm_correction ? 1 : 0;
    write_struct(out, format);
    return {};
  });
}

kvtile_status kvtile_slot_layout(const kvtile_format* format, kvtile_slot_map* map) {
  return guarded([&]() -> Status {
    if (format == nullptr) return kvtile::invalid("format", "null", "a struct");
    if (map == nullptr) return kvtile::invalid("map", "null", "a struct");
    KVTILE_RETURN_IF_ERROR(check_output("map", map));
    kvtile::SlotFormat f;
    KVTILE_RETURN_IF_ERROR(to_format(*format, &f));
    kvtile_slot_map out = KVTILE_INIT(kvtile_slot_map);
    out.key_bytes = f.key_bytes();
    out.norm_offset = f.rotated() ? f.norm_offset() : -1;
    out.value_offset = f.value_offset();
    out.scale_offset = f.scale_offset();
    out.zero_offset = f.zero_offset();
    out.slot_bytes = f.slot_bytes();
    write_struct(out, map);
    return {};
  });
}

kvtile_status kvtile_cache_descriptor(const kvtile_cache* cache, char* buffer, size_t buffer_bytes,
                                      size_t* needed) {
  return guarded([&]() -> Status {
    if (cache == nullptr) return kvtile::invalid("cache", "null", "a struct");
    kvtile::PagedCache c;
    KVTILE_RETURN_IF_ERROR(to_cache(*cache, &c));
    const std::string text = kvtile::cache_descriptor(c);
    if (needed != nullptr) *needed = text.size() + 1;
    if (buffer == nullptr) return {};
    if (buffer_bytes < text.size() + 1) {
      return kvtile::invalid("buffer_bytes", buffer_bytes, fmt::format(">= {}", text.size() + 1));
    }
    std::memcpy(buffer, text.c_str(), text.size() + 1);
    return {};
  });
}

kvtile_status kvtile_match_descriptor(const kvtile_cache* cache, const char* descriptor) {
  return guarded([&]() -> Status {
    if (cache == nullptr) return kvtile::invalid("cache", "null", "a struct");
    if (descriptor == nullptr) return kvtile::invalid("descriptor", "null", "a line");
    kvtile::PagedCache c;
    KVTILE_RETURN_IF_ERROR(to_cache(*cache, &c));
    return kvtile::match_descriptor(c, descriptor);
  });
}

kvtile_status kvtile_encode(const kvtile_encode_call* original, kvtile_encode_report* report) {
  return guarded([&]() -> Status {
    kvtile_encode_call in;
    KVTILE_RETURN_IF_ERROR(read_struct("encode_call", original, &in));
    if (report != nullptr) KVTILE_RETURN_IF_ERROR(check_output("report", report));
    kvtile::EncodeCall call;
    KVTILE_RETURN_IF_ERROR(kvtile::to_dtype(in.dtype, &call.dtype));
    KVTILE_RETURN_IF_ERROR(to_cache(in.cache, &call.cache));
    call.key = in.key;
    call.value = in.value;
    call.num_tokens = in.num_tokens;
    call.key_stride_token = in.key_stride_token;
    call.key_stride_head = in.key_stride_head;
    call.value_stride_token = in.value_stride_token;
    call.value_stride_head = in.value_stride_head;
    call.slot_mapping = in.slot_mapping;
    call.checked = in.checked != 0;
    kvtile::EncodeReport counts;
    KVTILE_RETURN_IF_ERROR(
        kvtile::encode_slots(call, report != nullptr ? &counts : nullptr, run_options(in)));
    if (report != nullptr) {
      kvtile_encode_report out;
      KVTILE_RETURN_IF_ERROR(read_struct("report", report, &out));
      out.tokens += counts.tokens;
      out.skipped += counts.skipped;
      out.non_finite_keys += counts.non_finite_keys;
      out.non_finite_values += counts.non_finite_values;
      out.norms_saturated += counts.norms_saturated;
      out.key_elements_clamped += counts.key_elements_clamped;
      out.value_elements_clamped += counts.value_elements_clamped;
      write_struct(out, report);
    }
    return {};
  });
}

kvtile_status kvtile_decode(const kvtile_decode_call* original) {
  return guarded([&]() -> Status {
    kvtile_decode_call in;
    KVTILE_RETURN_IF_ERROR(read_struct("decode_call", original, &in));
    kvtile::DecodeCall call;
    KVTILE_RETURN_IF_ERROR(kvtile::to_dtype(in.dtype, &call.dtype));
    KVTILE_RETURN_IF_ERROR(to_cache(in.cache, &call.cache));
    call.slot_mapping = in.slot_mapping;
    call.num_tokens = in.num_tokens;
    call.key = in.key;
    call.value = in.value;
    call.unrotate_keys = in.unrotate_keys != 0;
    return kvtile::decode_slots(call, run_options(in));
  });
}

kvtile_status kvtile_workspace_bytes(const kvtile_attention_call* call, size_t* bytes) {
  return guarded([&]() -> Status {
    if (bytes == nullptr) return kvtile::invalid("bytes", "null", "a size_t");
    Attention a;
    KVTILE_RETURN_IF_ERROR(to_attention(call, &a));
    return kvtile::workspace_bytes(a.call, a.options, bytes);
  });
}

kvtile_status kvtile_attend(const kvtile_attention_call* call, kvtile_run_report* report) {
  return guarded([&]() -> Status {
    if (report != nullptr) KVTILE_RETURN_IF_ERROR(check_output("report", report));
    Attention a;
    KVTILE_RETURN_IF_ERROR(to_attention(call, &a));
    kvtile::RunReport run;
    KVTILE_RETURN_IF_ERROR(kvtile::attend(a.call, a.workspace, a.options, &run));
    if (report != nullptr) {
      kvtile_run_report out = KVTILE_INIT(kvtile_run_report);
      out.num_threads = run.num_threads;
      out.backend = run.backend;
      out.workspace_bytes = run.workspace_bytes;
      out.tile_tokens = run.tile_tokens;
      write_struct(out, report);
    }
    return {};
  });
}

kvtile_status kvtile_merge(const kvtile_merge_call* original) {
  return guarded([&]() -> Status {
    kvtile_merge_call in;
    KVTILE_RETURN_IF_ERROR(read_struct("merge_call", original, &in));
    if (in.num_states < 1) return kvtile::invalid("num_states", in.num_states, ">= 1");
    if (in.states == nullptr) return kvtile::invalid("states", "null", "[num_states] states");
    std::vector<kvtile::PartialState> states(static_cast<size_t>(in.num_states));
    for (size_t i = 0; i < states.size(); ++i) {
      const kvtile_partial_state& s = in.states[i];
      if (s.size != sizeof(kvtile_partial_state)) {
        return kvtile::invalid(fmt::format("states[{}].size", i), s.size,
                               fmt::format("{}", sizeof(kvtile_partial_state)));
      }
      states[i] = {s.out,
                   s.lse,
                   s.out_stride_token,
                   s.out_stride_head,
                   s.lse_stride_head,
                   s.lse_stride_token};
    }
    kvtile::MergeCall call;
    KVTILE_RETURN_IF_ERROR(kvtile::to_dtype(in.dtype, &call.dtype));
    call.states = states.data();
    call.num_states = in.num_states;
    call.total_q = in.total_q;
    call.num_heads = in.num_heads;
    call.head_dim = in.head_dim;
    call.out = in.out;
    call.lse = in.lse;
    call.out_stride_token = in.out_stride_token;
    call.out_stride_head = in.out_stride_head;
    call.lse_stride_head = in.lse_stride_head;
    call.lse_stride_token = in.lse_stride_token;
    return kvtile::merge_states(call, run_options(in));
  });
}

int kvtile_num_devices(void) { return kvtile::num_devices(); }

kvtile_status kvtile_device_info(int ordinal, kvtile_device* device) {
  return guarded([&]() -> Status {
    if (device == nullptr) return kvtile::invalid("device", "null", "a struct");
    KVTILE_RETURN_IF_ERROR(check_output("device", device));
    if (ordinal < 0) return kvtile::invalid("device", ordinal, ">= 0");
    const kvtile::DeviceInfo* info;
    KVTILE_RETURN_IF_ERROR(kvtile::device_info(ordinal, &info));
    kvtile_device out = KVTILE_INIT(kvtile_device);
    out.arch = info->arch;
    out.num_sms = info->num_sms;
    out.shared_bytes_per_block = info->shared_bytes_per_block;
    out.shared_bytes_per_sm = info->shared_bytes_per_sm;
    out.copy_rate_measured = info->copy_rate_measured ? 1 : 0;
    out.l2_bytes = info->l2_bytes;
    out.memory_bytes = info->memory_bytes;
    out.copy_gb_per_s = info->copy_gb_per_s;
    out.name = info->name.c_str();
    write_struct(out, device);
    return {};
  });
}

int kvtile_num_backends(void) { return kvtile::num_backends(); }
const char* kvtile_backend_name(int index) { return kvtile::backend_name(index); }

kvtile_status kvtile_backend_supports(const char* backend, const kvtile_attention_call* call) {
  return guarded([&]() -> Status {
    if (backend == nullptr) return kvtile::invalid("backend", "null", "a backend name");
    Attention a;
    KVTILE_RETURN_IF_ERROR(to_attention(call, &a));
    return kvtile::backend_supports(backend, a.call, a.options.device);
  });
}

}  // extern "C"
