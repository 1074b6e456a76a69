#include "gpu/gpu_operation.h"

#include "gpu/nccl/nccl_operation.h"
#include "gpu/staged_operation.h"

namespace sirtaki {

Status GpuOperation::advance(Nanoseconds now, Progress& progress) {
  const GpuDevice::Scope scope(gpu_ ? &gpu_->device() : nullptr);
  SIRTAKI_TRY(scope.status());
  if (is_at_work_) return running_->advance(now, progress);
  if (!group_.has_agreed) return agree(now, progress);
  return begin(progress);
}

Status GpuOperation::agree(Nanoseconds now, Progress& progress) {
  progress = Progress::moved;
  if (!handshake_) {
    const bool creates_id = transfer_->own == 0 && gpu_ && gpu_->device().libraries().has_nccl();
    if (creates_id && !id_.has_started())
      SIRTAKI_TRY(id_.start([device = gpu_->shared_device()] { return create_id(*device); }, [](const CreatedId&) {}));
    if (creates_id && !id_.is_over()) progress = Progress::blocked;
    if (progress == Progress::blocked) return Status::ok();
    const GpuParts& parts = backend_.parts();
    const int32_t host = parts.host_of[static_cast<size_t>(parts.rank)];
    const GpuFacts own = gather_facts(gpu_, host, creates_id ? &id_.result() : nullptr);
    handshake_ = std::make_unique<BackendHandshake>(*transfer_, own);
    Backend* on_cpu = backend_.backend_on_cpu(*handshake_->transfer());
    if (!on_cpu) return {SRT_INTERNAL, "no data plane of the CPU serves an operation of GPUs"};
    running_ = on_cpu->start(handshake_->transfer());
  }
  Progress inner = Progress::done;
  if (running_) SIRTAKI_TRY(running_->advance(now, inner));
  if (inner == Progress::blocked) progress = Progress::blocked;
  if (inner != Progress::done) return Status::ok();
  running_.reset();
  return backend_.decide(*transfer_, handshake_->facts(), group_);
}

Status GpuOperation::begin(Progress& progress) {
  progress = Progress::moved;
  if (!backend_.goes_through_nccl(group_, *transfer_)) {
    Backend* on_cpu = backend_.backend_on_cpu(*transfer_);
    if (!on_cpu) return {SRT_INTERNAL, "no data plane of the CPU serves an operation of GPUs"};
    running_ = std::make_unique<StagedOperation>(gpu_, *on_cpu, *transfer_, handshake_ ? BackendHandshake::phases : 0);
    is_at_work_ = true;
    return Status::ok();
  }
  bool is_connected = true;
  if (group_.uses_nccl) SIRTAKI_TRY(connect(is_connected));
  if (!is_connected) progress = Progress::blocked;
  if (!is_connected) return Status::ok();
  const NcclReduction reduction =
      nccl_reduction(*transfer_, group_.has_kernels).value_or(NcclReduction());  // empty for copies alone
  running_ =
      std::make_unique<NcclOperation>(*gpu_, group_.communicator.get(), backend_.parts().kernels, transfer_, reduction);
  is_at_work_ = true;
  return Status::ok();
}

Status GpuOperation::connect(bool& is_connected) {
  if (!group_.communicator) {
    group_.communicator = std::make_unique<Communicator>(gpu_->shared_device());
    SIRTAKI_TRY(group_.communicator->begin(group_.id, transfer_->members.size(), transfer_->own));
  }
  return group_.communicator->poll(is_connected);
}

void GpuOperation::cancel() {
  const GpuDevice::Scope scope(gpu_ ? &gpu_->device() : nullptr);
  backend_.abort();
  // Kernels that NCCL is still launching are not on the stream yet.
  if (is_at_work_ && !running_->launched()) backend_.await_abort();
  if (running_) running_->cancel();
}

std::vector<int32_t> GpuOperation::waits_for() const {
  return running_ ? running_->waits_for() : std::vector<int32_t>{};
}

unsigned GpuOperation::still_needs(unsigned needed_at_start) const {
  if (is_at_work_) return running_->still_needs(needed_at_start & ~unsigned{needs_launches});
  return backend_.goes_through_nccl(group_, *transfer_) ? needs_launches : needed_at_start;
}

}  // namespace sirtaki
