// One transfer of tensors on GPUs over the data plane of the CPU: to pinned memory on the host, through an operation
// there, and back. It needs only the CUDA driver, and supports every kind and dtype that the CPU supports.
#pragma once

#include <map>

#include "data/operation.h"
#include "gpu/device/gpu.h"

namespace sirtaki {

class StagedOperation final : public Operation {
 public:
  // `gpu` is nullptr on a rank that has joined without having used one. `phase`: the index of this transfer in the
  // plan.
  StagedOperation(Gpu* gpu, Backend& backend, const Transfer& on_gpu, int32_t phase);
  ~StagedOperation() override;

  Status advance(Nanoseconds now, Progress& progress) override;
  void cancel() override;
  bool is_quiet() const override;
  std::vector<int32_t> waits_for() const override;
  bool must_be_polled() const override { return !inner_; }
  DeviceWait device_wait() const override { return inputs_.are_ready() ? DeviceWait::none : DeviceWait::input; }
  unsigned still_needs(unsigned needed_at_start) const override;
  GpuEventPtr launched() const override { return step_ == Step::copying_out ? copied_ : nullptr; }

 private:
  enum class Step { start, copying_in, moving, copying_out };

  Status mirror();
  ScatterList mirror(const ScatterList& list, uint8_t*& free_memory);
  Status copy(const std::vector<GpuCopy>& copies);
  Status mark();
  Status look(bool& is_over) const;

  Gpu* gpu_;
  Backend& backend_;
  std::shared_ptr<Transfer> transfer_;  // over the GPU's memory, then over the host's
  GpuInputs inputs_;  // ready in most cases, because such operations are reported only then
  std::vector<GpuCopy> in_, out_;
  std::map<std::pair<const uint8_t*, int64_t>, uint8_t*> mirrored_;  // inputs, which may be in several lists
  MemoryBlock memory_;
  GpuEventPtr copied_;
  bool is_unmarked_ = false;  // copies are in flight that no event follows
  std::unique_ptr<Operation> inner_;
  Step step_ = Step::start;
};

}  // namespace sirtaki
