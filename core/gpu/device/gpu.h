// The GPU of a rank, and the rank's resources on it: two streams, events, memory and kernels.
#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "base/settings/knobs.h"
#include "base/thread_safety.h"
#include "gpu/device/kernels.h"
#include "gpu/device/memory.h"

namespace sirtaki {

class Gpu {
 public:
  static Status open(const GpuLibraries& libraries, int ordinal, std::unique_ptr<Gpu>& out);
  ~Gpu();

  const GpuDevice& device() const { return *device_; }
  std::shared_ptr<const GpuDevice> shared_device() const { return device_; }
  EventPool& events() { return events_; }
  MemoryPool& memory() { return memory_; }
  MemoryPool& pinned() { return pinned_; }
  const GpuKernels& kernels() const { return kernels_; }
  CudaStream launches() const { return launches_; }  // work that waits for other ranks' GPUs, in the order of plans
  CudaStream copies() const { return copies_; }      // copies to and from the host, concurrent with launches

  // Adds a copy to a stream.
  Status copy(const GpuCopy& copy, CudaStream stream) const;
  // Adds copies within the GPU's memory, which may run in any order, to a stream, by few calls if possible.
  Status copy_all(std::span<const GpuCopy> copies, CudaStream stream) const;

 private:
  explicit Gpu(std::unique_ptr<GpuDevice> device);
  Status start();
  Status copy_batch(std::span<const GpuCopy> copies, CudaStream stream) const;
  bool is_idle();  // whether `launches` has no work

  std::shared_ptr<const GpuDevice> device_;
  EventPool events_;
  MemoryPool memory_, pinned_;
  GpuKernels kernels_;
  CudaStream launches_ = nullptr, copies_ = nullptr;
};

// An output that the core allocates on the GPU. After its release, the memory is reused only when the last stream
// that has waited for it has passed that point; without such a stream, its owner must have finished using it.
class GpuOutput {
 public:
  static Status allocate(Gpu& gpu, size_t bytes, std::unique_ptr<GpuOutput>& out);
  ~GpuOutput();

  uint8_t* data() const { return block_.data(); }
  void used_on(CudaStream stream) {
    stream_ = stream;
    is_used_ = true;
  }
  // Releases it on behalf of its owner, while that stream still exists.
  void release();

 private:
  explicit GpuOutput(Gpu& gpu) : gpu_(gpu) {}

  Gpu& gpu_;
  MemoryBlock block_;
  CudaStream stream_ = nullptr;  // nullptr is the default stream
  bool is_used_ = false;
  GpuEventPtr after_;  // once released: an event behind its last use
};

// The rank's choice of a GPU. The libraries are opened and a GPU is used only when the first request for one arrives.
class GpuChoice {
 public:
  // `rank` names the rank in the log.
  GpuChoice(const Config& config, std::string rank, const Log& log)
      : config_(config), rank_(std::move(rank)), log_(log) {}

  // Chooses this GPU for the rank; fails if the rank works on another one. Callable from any thread.
  Status choose(int32_t ordinal);
  // Finds the GPU that holds this memory. Callable from any thread.
  Status find(uintptr_t address, int32_t& ordinal);

  Gpu* gpu() const { return chosen_.load(std::memory_order_acquire); }  // nullptr until chosen

  // Forgets the GPU in a forked child, since it is the parent's. Takes no lock, because it may be held for ever
  // there.
  void forked() NOT_ANALYZED;

 private:
  Status open_libraries() REQUIRES(mutex_);

  const Config& config_;
  const std::string rank_;
  const Log log_;
  Mutex mutex_;
  std::unique_ptr<CallWatch> watch_ GUARDED_BY(mutex_);
  std::unique_ptr<GpuLibraries> libraries_ GUARDED_BY(mutex_);
  std::unique_ptr<Gpu> gpu_ GUARDED_BY(mutex_);
  std::atomic<Gpu*> chosen_{nullptr};
};

}  // namespace sirtaki
