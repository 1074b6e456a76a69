// Events of a GPU, which are reused: creating one costs more than recording it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/thread_safety.h"
#include "gpu/device.h"

namespace sirtaki {

class EventPool;

// A point in a stream. Any thread may query it, and for any stream.
class GpuEvent {
 public:
  GpuEvent(EventPool& pool, CudaEvent event, CudaStream stream) : pool_(pool), event_(event), stream_(stream) {}
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  CudaStream stream() const { return stream_; }

  // Returns whether everything before it has ended. Fails when the GPU has failed.
  Status look(bool& has_fired);

  // Makes work that is added to the stream from now on wait for it there; the caller does not wait.
  Status hold_back(CudaStream stream);

 private:
  EventPool& pool_;
  CudaEvent event_;
  CudaStream stream_;
  std::atomic<bool> has_fired_{false};
};
using GpuEventPtr = std::shared_ptr<GpuEvent>;

class EventPool {
 public:
  explicit EventPool(const GpuDevice& device) : device_(device) {}
  ~EventPool();

  // Records an event behind what the stream holds now. The pool has to outlive it.
  Status record(CudaStream stream, GpuEventPtr& out);

 private:
  friend class GpuEvent;
  Status take(CudaEvent& event);
  void put_back(CudaEvent event);

  const GpuDevice& device_;
  Mutex mutex_;
  std::vector<CudaEvent> free_ GUARDED_BY(mutex_);
};

}  // namespace sirtaki
