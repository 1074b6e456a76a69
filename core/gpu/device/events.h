// Events of a GPU. They are reused, because creating one costs more than recording it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/thread_safety.h"
#include "gpu/device/device.h"

namespace sirtaki {

// In place of a stream: all streams that use the GPU's primary context, for a program that does not tell its own.
inline CudaStream all_streams() { return reinterpret_cast<CudaStream>(~uintptr_t{0}); }

class EventPool;

// A point in a stream, which any thread may query, and any stream may wait for.
class GpuEvent {
 public:
  GpuEvent(EventPool& pool, CudaEvent event, CudaStream stream) : pool_(pool), event_(event), stream_(stream) {}
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  CudaStream stream() const { return stream_; }

  // Returns whether all work before the event has ended. Fails if the GPU has failed.
  Status look(bool& has_fired);

  // Makes all work that is added to the stream from now on wait for the event on the GPU; the caller does not wait.
  Status hold_back(CudaStream stream);

 private:
  EventPool& pool_;
  CudaEvent event_;
  CudaStream stream_;
  std::atomic<bool> has_fired_{false};
};
using GpuEventPtr = std::shared_ptr<GpuEvent>;

// The inputs of an operation, which other streams may still be computing.
class GpuInputs {
 public:
  explicit GpuInputs(std::vector<GpuEventPtr> events) : events_(std::move(events)) {}

  // Makes all work that is added to the stream from now on wait for the inputs on the GPU.
  Status hold_back(CudaStream stream) const;
  // Returns whether the last inputs have become ready since the last call. Fails if the GPU has failed.
  Status look(bool& have_come);
  bool are_ready() const { return events_.empty(); }  // when look() was called last

 private:
  std::vector<GpuEventPtr> events_;  // that have not fired
};

class EventPool {
 public:
  explicit EventPool(const GpuDevice& device) : device_(device) {}
  ~EventPool();

  // Records an event behind the work that the stream, or all_streams(), holds now. The pool must outlive it.
  Status record(CudaStream stream, GpuEventPtr& out);

 private:
  friend class GpuEvent;
  Status take(CudaEvent& event);
  Status record_all(CudaEvent event) const;
  void put_back(CudaEvent event);

  const GpuDevice& device_;
  Mutex mutex_;
  std::vector<CudaEvent> free_ GUARDED_BY(mutex_);
};

}  // namespace sirtaki
