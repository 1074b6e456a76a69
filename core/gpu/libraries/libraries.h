// libcuda and libnccl, opened at run time: the copy that the program (a framework) has loaded already, then those in
// the folders of the knob gpu_libraries, then the system's. Opened once and never closed, because their threads may
// live on.
#pragma once

#include <memory>
#include <string>

#include "base/settings/knobs.h"
#include "base/status.h"
#include "gpu/libraries/cuda.h"
#include "gpu/libraries/nccl.h"

namespace sirtaki {

// The result of the search for one library.
struct LibraryFound {
  int version = 0;  // in the library's own encoding; 0: it cannot be used
  std::string path;  // path of the file; empty: none
  std::string text;  // one line: "libnccl 2.28.3 from /...", or what was searched for, where, and why it was rejected
};

class GpuLibraries {
 public:
  // Opens the libraries. Does not fail: `text` explains what cannot be used. Opening libcuda initialises the driver,
  // but creates nothing on a GPU.
  explicit GpuLibraries(const Config& config, std::shared_ptr<RunningCalls> calls = nullptr);

  const LibraryFound& found_cuda() const { return found_cuda_; }
  const LibraryFound& found_nccl() const { return found_nccl_; }
  bool has_cuda() const { return found_cuda_.version > 0; }
  bool has_nccl() const { return has_cuda() && found_nccl_.version > 0; }
  int device_count() const { return device_count_; }

  // Valid only if has_cuda() and has_nccl() hold.
  const CudaFunctions& cuda() const { return cuda_; }
  const NcclFunctions& nccl() const { return nccl_; }

  // Return ok, or SRT_DEVICE (SRT_OUT_OF_MEMORY if memory was exhausted) with the attempted call and the library's
  // own text. NCCL continuing in the background (nccl_in_progress) is not a failure.
  Status check(CudaResult result, const char* attempt) const;
  Status check_nccl(NcclResult result, const char* attempt, NcclCommunicator communicator = nullptr) const;

 private:
  void open_cuda(const std::string& folders);
  void open_nccl(const std::string& folders);

  std::shared_ptr<RunningCalls> calls_;
  CudaFunctions cuda_;
  NcclFunctions nccl_;
  LibraryFound found_cuda_, found_nccl_;
  int device_count_ = 0;
};

}  // namespace sirtaki
