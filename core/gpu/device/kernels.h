// The kernels of kernel_text.h on one GPU.
#pragma once

#include <span>

#include "data/kernels/kernels.h"
#include "gpu/device/device.h"
#include "gpu/device/kernel_text.h"

namespace sirtaki {

// A copy; each end may be on the GPU or in pinned memory of the host.
struct GpuCopy {
  uint8_t* to;
  const uint8_t* from;
  int64_t bytes;
};

class GpuKernels {
 public:
  explicit GpuKernels(const GpuDevice& device) : device_(device) {}
  ~GpuKernels();
  GpuKernels(const GpuKernels&) = delete;
  GpuKernels& operator=(const GpuKernels&) = delete;

  // Loads the kernels on the GPU, which is current and has no work that waits for other ranks.
  void load(CudaStream stream);
  const Status& status() const { return status_; }  // why they cannot be used; ok if they can

  // Adds copies within the GPU's memory, which may run in any order, to a stream.
  Status copy(std::span<const GpuCopy> copies, CudaStream stream) const;
  // Adds copies of 16-bit floats to a stream, which are scaled in float32 and rounded once, as by the CPU's kernels. A
  // copy may be to where it is from.
  Status scale(DType dtype, std::span<const GpuCopy> copies, Scale scale, CudaStream stream) const;

 private:
  Status try_to_load(CudaStream stream);
  Status run(KernelKind kind, std::span<const GpuCopy> copies, Scale scale, CudaStream stream) const;
  Status launch(CudaKernel kernel, std::span<const KernelPiece> pieces, Scale scale, CudaStream stream) const;

  const GpuDevice& device_;
  Status status_{SRT_UNSUPPORTED, "the kernels were not loaded"};
  CudaModule module_ = nullptr;
  CudaKernel kernels_[kernel_kinds][2] = {};  // narrow and wide
};

}  // namespace sirtaki
