// An AttendProblem on the device: every array copied into memory of its own between watched
// margins, outputs copied back into the problem, so that the checks of tests/testing judge both
// sides. Pages keep the alignment they have on the host, hidden bytes their poison.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/cuda/device_buffer.h"
#include "tests/testing/compare.h"
#include "tests/testing/generate.h"

namespace kvtile::testing {

// Kernel error of the CUDA engines: fp16 operands and weights, fp32 state. The bar is 1.5e-3. An
// lse moves with its scores, whose operands are rounded to fp16: 4e-3 is six deviations at
// head_dim 64.
inline constexpr Tolerance kGpuTolerance = {1.5e-3, 4e-3};

class GpuProblem {
 public:
  explicit GpuProblem(AttendProblem* problem) : problem_(*problem), call(problem->call) {
    for (const AttendProblem::Region& region : problem->input_regions()) add(region);
    for (const AttendProblem::Region& region : problem->output_regions()) add(region);
    for (const void** pointer :
         {&call.query, const_cast<const void**>(&call.out), &call.chunk_key, &call.chunk_value}) {
      *pointer = device_address(*pointer);
    }
    call.lse = device_address(call.lse);
    call.sinks = device_address(call.sinks);
    call.cache.pages = device_address(call.cache.pages);
    call.block_table = device_address(call.block_table);
    call.cu_seqlens_q = device_address(call.cu_seqlens_q);
    call.seq_lens = device_address(call.seq_lens);
    call.first_positions = device_address(call.first_positions);
    for (int s = 0; s < problem->num_seqs(); ++s) {
      call.max_q_len = std::max(call.max_q_len, problem->q_len(s));
    }
  }

  // Exactly workspace_bytes() of poisoned workspace, outputs refilled before and downloaded after.
  Status run(const RunOptions& options, RunReport* report = nullptr) {
    size_t bytes = 0;
    if (Status status = workspace_bytes(call, options, &bytes); !status.ok()) return status;
    if (workspace_.size() != bytes) workspace_ = DeviceBuffer(bytes);
    workspace_.fill(0xFF);
    upload_outputs();
    Status status =
        attend(call, Workspace{bytes > 0 ? workspace_.as<>() : nullptr, bytes}, options, report);
    download();
    return status;
  }

  // The pattern of untouched outputs, then what they hold on the device.
  void upload_outputs() {
    problem_.refill_outputs();
    for (size_t i = regions_.size() - 2; i < regions_.size(); ++i) regions_[i].upload();
  }
  void upload_inputs() {
    for (size_t i = 0; i + 2 < regions_.size(); ++i) regions_[i].upload();
  }
  // Synchronises the device.
  void download() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t i = regions_.size() - 2; i < regions_.size(); ++i) regions_[i].download();
  }

  ::testing::AssertionResult margins_intact() const {
    for (const Copy& region : regions_) {
      if (auto result = region.device.margins_intact(); !result) return result;
    }
    return workspace_.size() > 0 ? workspace_.margins_intact() : ::testing::AssertionSuccess();
  }

 private:
  struct Copy {
    AttendProblem::Region host;
    size_t shift;  // keeps the host's alignment
    DeviceBuffer device;

    std::byte* data() const { return device.as<>() + shift; }
    void upload() {
      EXPECT_EQ(cudaMemcpy(data(), host.data, host.bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
    void download() {
      EXPECT_EQ(cudaMemcpy(host.data, data(), host.bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    }
  };

  void add(const AttendProblem::Region& region) {
    const size_t shift = reinterpret_cast<uintptr_t>(region.data) % 16;
    regions_.push_back({region, shift, DeviceBuffer(shift + region.bytes)});
    regions_.back().upload();
  }
  template <typename T>
  T* device_address(T* host) const {
    if (host == nullptr) return nullptr;
    const auto* address = reinterpret_cast<const std::byte*>(host);
    for (const Copy& region : regions_) {
      if (address < region.host.data || address >= region.host.data + region.host.bytes) continue;
      return reinterpret_cast<T*>(region.data() + (address - region.host.data));
    }
    return nullptr;  // an empty array
  }

  AttendProblem& problem_;
  std::vector<Copy> regions_;  // inputs, then output and lse
  DeviceBuffer workspace_;

 public:
  AttentionCall call;  // device pointers; max_q_len given
};

}  // namespace kvtile::testing
