#include "gpu/communicator.h"

#include <chrono>
#include <thread>

namespace sirtaki {

Communicator::~Communicator() { abort(); }

Status Communicator::begin(const NcclUniqueId& id, size_t members, size_t own) {
  const GpuDevice::Scope scope(&device_);
  SIRTAKI_TRY(scope.status());
  NcclConfig config;
  const NcclResult result = nccl().init(&communicator_, static_cast<int>(members), id, static_cast<int>(own), &config);
  return check(result, "ncclCommInitRankConfig");
}

Status Communicator::poll(bool& is_over) const {
  NcclResult state = nccl_success;
  SIRTAKI_TRY(check(nccl().async_error(communicator_, &state), "ncclCommGetAsyncError"));
  is_over = state != nccl_in_progress;
  return check(state, "an operation of NCCL");
}

Status Communicator::check(NcclResult result, const char* attempt) const {
  if (result == nccl_in_progress) return Status::ok();
  return device_.libraries().check_nccl(result, attempt, communicator_);
}

void Communicator::abort() {
  if (!communicator_) return;
  const GpuDevice::Scope scope(&device_);  // NCCL knows the GPU itself if the driver refuses
  std::ignore = nccl().abort(communicator_);
  communicator_ = nullptr;
}

void Communicator::finish(Nanoseconds deadline) {
  if (!communicator_) return;
  const GpuDevice::Scope scope(&device_);
  if (!scope.status().is_ok() || !check(nccl().finalize(communicator_), "ncclCommFinalize").is_ok()) return abort();
  bool is_over = false;
  while (poll(is_over).is_ok() && !is_over) {
    if (now() >= deadline) return abort();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (!is_over) return abort();
  std::ignore = nccl().destroy(communicator_);
  communicator_ = nullptr;
}

}  // namespace sirtaki
