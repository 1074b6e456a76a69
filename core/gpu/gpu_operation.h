// One transfer of tensors on GPUs, from the members' agreement on a transport to its completion.
#pragma once

#include "gpu/gpu_backend.h"

namespace sirtaki {

class GpuOperation final : public Operation {
 public:
  GpuOperation(GpuBackend& backend, GpuGroup& group, TransferPtr transfer)
      : backend_(backend), group_(group), gpu_(backend.parts().choice.gpu()), transfer_(std::move(transfer)) {}

  Status advance(Nanoseconds now, Progress& progress) override;
  void cancel() override;
  bool is_quiet() const override { return !running_ || running_->is_quiet(); }
  std::vector<int32_t> waits_for() const override;
  bool must_be_polled() const override { return !running_ || running_->must_be_polled(); }
  DeviceWait device_wait() const override { return is_at_work_ ? running_->device_wait() : DeviceWait::connection; }
  unsigned still_needs(unsigned needed_at_start) const override;
  std::shared_ptr<GpuEvent> launched() const override { return is_at_work_ ? running_->launched() : nullptr; }

 private:
  Status agree(Nanoseconds now, Progress& progress);
  Status begin(Progress& progress);
  Status connect(bool& is_connected);

  GpuBackend& backend_;
  GpuGroup& group_;
  Gpu* const gpu_;  // nullptr on a rank that has joined without having used one
  TransferPtr transfer_;
  BackgroundCall<CreatedId> id_;  // of the first member, if it takes part in the exchange that follows
  std::unique_ptr<BackendHandshake> handshake_;  // set if this operation exchanges the members' properties
  bool is_at_work_ = false;
  std::unique_ptr<Operation> running_;  // the handshake's operation, then the transfer's
};

}  // namespace sirtaki
