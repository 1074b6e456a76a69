// Events of a GPU, used again and again: to create one costs more than to record it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device.h"

namespace sirtaki {

class EventPool;

// A point in a stream. Any thread may ask, and for any stream.
class GpuEvent {
 public:
  GpuEvent(EventPool& pool, CudaEvent event, CudaStream stream) : pool_(pool), event_(event), stream_(stream) {}
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  CudaStream stream() const { return stream_; }

  // Has everything before it ended? Not ok when the GPU has failed.
  Status look(bool& has_fired);

  // What is added to the stream from now on waits for it there; the caller does not.
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

  // An event behind what the stream holds now. The pool has to outlive it.
  Status record(CudaStream stream, GpuEventPtr& out);

 private:
  friend class GpuEvent;
  Status take(CudaEvent& event);
  void put_back(CudaEvent event);

  const GpuDevice& device_;
  std::mutex mutex_;
  std::vector<CudaEvent> free_;
};

}  // namespace sirtaki
