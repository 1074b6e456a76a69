// One GPU as used by one rank: the primary context, which the rank shares with the frameworks in its process.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "gpu/libraries/libraries.h"

namespace sirtaki {

class GpuDevice {
 public:
  // Retains the primary context of the GPU with this number.
  static Status open(const GpuLibraries& libraries, int ordinal, std::unique_ptr<GpuDevice>& out);
  ~GpuDevice();

  int ordinal() const { return ordinal_; }
  const std::string& bus_id() const { return bus_id_; }  // unique among the GPUs of the host
  const CudaUuid& uuid() const { return uuid_; }         // a part of a GPU (MIG) has one of its own
  CudaContext context() const { return context_; }
  const GpuLibraries& libraries() const { return libraries_; }
  const CudaFunctions& cuda() const { return libraries_.cuda(); }
  Status check(CudaResult result, const char* attempt) const { return libraries_.check(result, attempt); }

  // A scope in which this GPU is the current one of the calling thread; afterwards the previous one is again. If the
  // driver refuses the change, another GPU may still be current: the scope must then be left without using it. Calls
  // in the scope neither fail nor invalidate the capture while the program captures a stream into a CUDA graph, in
  // whichever thread: its default mode forbids queries and allocations to all threads that do not say otherwise.
  class Scope {
   public:
    explicit Scope(const GpuDevice* device);  // nullptr: does nothing
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    const Status& status() const { return status_; }  // ok if the GPU is current

   private:
    const GpuDevice* device_;
    Status status_;
    int capture_mode_ = cuda_capture_relaxed;  // the one to set next: the thread's own while the scope lasts
  };

 private:
  GpuDevice(const GpuLibraries& libraries, int ordinal) : libraries_(libraries), ordinal_(ordinal) {}
  Status retain();

  const GpuLibraries libraries_;  // a copy: calls in the background may outlive the rank's
  const int ordinal_;
  CudaDevice device_ = 0;
  CudaContext context_ = nullptr;
  std::string bus_id_;
  CudaUuid uuid_ = {};
};

}  // namespace sirtaki
