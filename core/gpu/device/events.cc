#include "gpu/device/events.h"

namespace sirtaki {

GpuEvent::~GpuEvent() { pool_.put_back(event_); }

Status GpuEvent::look(bool& has_fired) {
  has_fired = has_fired_.load(std::memory_order_acquire);
  if (has_fired) return Status::ok();
  const GpuDevice::Scope scope(&pool_.device_);
  SIRTAKI_TRY(scope.status());
  const CudaResult result = pool_.device_.cuda().event_query(event_);
  if (result == cuda_not_ready) return Status::ok();
  SIRTAKI_TRY(pool_.device_.check(result, "cuEventQuery"));
  has_fired = true;
  has_fired_.store(true, std::memory_order_release);
  return Status::ok();
}

Status GpuEvent::hold_back(CudaStream stream) {
  if (has_fired_.load(std::memory_order_acquire)) return Status::ok();
  const GpuDevice::Scope scope(&pool_.device_);
  SIRTAKI_TRY(scope.status());
  return pool_.device_.check(pool_.device_.cuda().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

Status GpuInputs::hold_back(CudaStream stream) const {
  for (const GpuEventPtr& event : events_) SIRTAKI_TRY(event->hold_back(stream));
  return Status::ok();
}

Status GpuInputs::look(bool& have_come) {
  have_come = false;
  while (!events_.empty()) {
    bool has_fired = false;
    SIRTAKI_TRY(events_.back()->look(has_fired));
    if (!has_fired) return Status::ok();
    events_.pop_back();
    have_come = events_.empty();
  }
  return Status::ok();
}

EventPool::~EventPool() {
  const GpuDevice::Scope scope(&device_);
  if (!scope.status().is_ok()) return;
  for (CudaEvent event : free_) std::ignore = device_.cuda().event_destroy(event);
}

Status EventPool::record(CudaStream stream, GpuEventPtr& out) {
  const GpuDevice::Scope scope(&device_);
  SIRTAKI_TRY(scope.status());
  CudaEvent event = nullptr;
  SIRTAKI_TRY(take(event));
  auto made = std::make_shared<GpuEvent>(*this, event, stream);
  if (stream == all_streams()) SIRTAKI_TRY(record_all(event));
  else SIRTAKI_TRY(device_.check(device_.cuda().event_record(event, stream), "cuEventRecord"));
  out = std::move(made);
  return Status::ok();
}

Status EventPool::record_all(CudaEvent event) const {
  const CudaFunctions& cuda = device_.cuda();
  if (cuda.context_record_event)
    return device_.check(cuda.context_record_event(device_.context(), event), "cuCtxRecordEvent");
  return {SRT_UNSUPPORTED, "the driver is " + device_.libraries().found_cuda().text +
                               ": operations that follow all streams of a GPU need CUDA 12.5 or later"};
}

Status EventPool::take(CudaEvent& event) {
  {
    const MutexLock lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
      return Status::ok();
    }
  }
  return device_.check(device_.cuda().event_create(&event, cuda_event_disable_timing), "cuEventCreate");
}

void EventPool::put_back(CudaEvent event) {
  const MutexLock lock(mutex_);
  free_.push_back(event);
}

}  // namespace sirtaki
