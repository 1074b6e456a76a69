#include "gpu/nccl/communicator.h"

#include <chrono>
#include <thread>
#include <utility>

namespace sirtaki {
namespace {

// A communicator that has not begun by then, or has not been destroyed, is left to the thread that does so.
constexpr Nanoseconds longest_call = seconds(1);

}  // namespace

Communicator::~Communicator() { abort(); }

Status Communicator::begin(const NcclUniqueId& id, size_t members, size_t own) {
  const auto begin = [device = device_, id, size = static_cast<int>(members), rank = static_cast<int>(own)] {
    Begun begun;
    const GpuDevice::Scope scope(device.get());
    begun.status = scope.status();
    if (!begun.status.is_ok()) return begun;
    NcclConfig config;
    const NcclResult result = device->libraries().nccl().init(&begun.communicator, size, id, rank, &config);
    begun.status = device->libraries().check_nccl(result, "ncclCommInitRankConfig", begun.communicator);
    return begun;
  };
  const auto drop = [device = device_](const Begun& begun) { abort(*device, begun.communicator); };
  return beginning_.emplace().start(begin, drop);
}

Status Communicator::poll(bool& is_over) {
  is_over = false;
  if (beginning_) {
    if (!beginning_->is_over()) return Status::ok();
    const Begun begun = beginning_->result();
    beginning_.reset();
    communicator_ = begun.communicator;
    SIRTAKI_TRY(begun.status);
  }
  NcclResult state = nccl_success;
  SIRTAKI_TRY(check(nccl().async_error(communicator_, &state), "ncclCommGetAsyncError"));
  is_over = state != nccl_in_progress;
  return check(state, "an operation of NCCL");
}

Status Communicator::check(NcclResult result, const char* attempt) const {
  if (result == nccl_in_progress) return Status::ok();
  return device_->libraries().check_nccl(result, attempt, communicator_);
}

void Communicator::abort() {
  if (beginning_ && beginning_->wait(now() + longest_call)) communicator_ = beginning_->result().communicator;
  beginning_.reset();
  abort(*device_, std::exchange(communicator_, nullptr));
}

void Communicator::abort(const GpuDevice& device, NcclCommunicator communicator) {
  if (!communicator) return;
  const GpuDevice::Scope scope(&device);  // NCCL knows the GPU itself if the driver refuses
  std::ignore = device.libraries().nccl().abort(communicator);
}

void Communicator::finish(Nanoseconds deadline) {
  if (!communicator_) return abort();
  const GpuDevice::Scope scope(device_.get());
  if (!scope.status().is_ok() || !check(nccl().finalize(communicator_), "ncclCommFinalize").is_ok()) return abort();
  bool is_over = false;
  while (poll(is_over).is_ok() && !is_over) {
    if (now() >= deadline) return abort();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (!is_over) return abort();
  const auto destroy = [device = device_, communicator = std::exchange(communicator_, nullptr)] {
    const GpuDevice::Scope own_scope(device.get());
    return device->libraries().nccl().destroy(communicator);
  };
  BackgroundCall<NcclResult> destroying;
  if (destroying.start(destroy, [](NcclResult) {}).is_ok()) destroying.wait(now() + longest_call);
}

}  // namespace sirtaki
