#include "gpu/device/kernels.h"

#include <algorithm>
#include <vector>

namespace sirtaki {
namespace {

// Long memory is cut into pieces, so that blocks of threads have equal work, however long the pieces of a launch are.
constexpr uint64_t most_units = 1 << 17;
constexpr uint64_t threads = 256, most_blocks = 64;

// Adds a copy's bytes [begin, end), which are units of a kernel.
void add_pieces(const GpuCopy& copy, int64_t begin, int64_t end, int64_t unit, std::vector<KernelPiece>& pieces) {
  const auto from = reinterpret_cast<uint64_t>(copy.from), to = reinterpret_cast<uint64_t>(copy.to);
  const auto bytes = static_cast<uint64_t>(unit);
  for (uint64_t at = static_cast<uint64_t>(begin), left = static_cast<uint64_t>(end - begin) / bytes; left;) {
    const uint64_t units = std::min(left, most_units);
    pieces.push_back({from + at, to + at, units});
    at += units * bytes;
    left -= units;
  }
}

}  // namespace

GpuKernels::~GpuKernels() {
  if (!module_) return;
  const GpuDevice::Scope scope(&device_);
  if (scope.status().is_ok()) std::ignore = device_.cuda().module_unload(module_);
}

void GpuKernels::load(CudaStream stream) { status_ = try_to_load(stream); }

// Launches each kernel once, on no memory: a driver may load it only then, and waits meanwhile for all work on the GPU,
// also for kernels that wait for other ranks.
Status GpuKernels::try_to_load(CudaStream stream) {
  const CudaFunctions& cuda = device_.cuda();
  if (!cuda.module_load || !cuda.module_unload || !cuda.module_kernel || !cuda.kernel_launch)
    return {SRT_UNSUPPORTED, "the driver has no cuModuleLoadData or no cuLaunchKernel"};
  SIRTAKI_TRY(device_.check(cuda.module_load(&module_, kernel_text().c_str()), "cuModuleLoadData"));
  for (int kind = 0; kind < kernel_kinds; ++kind)
    for (const bool is_wide : {false, true}) {
      CudaKernel& kernel = kernels_[kind][is_wide];
      const std::string name = kernel_name(static_cast<KernelKind>(kind), is_wide);
      SIRTAKI_TRY(device_.check(cuda.module_kernel(&kernel, module_, name.c_str()), "cuModuleGetFunction"));
      const KernelPiece nothing = {};
      SIRTAKI_TRY(launch(kernel, {&nothing, 1}, {}, stream));
    }
  return Status::ok();
}

Status GpuKernels::copy(std::span<const GpuCopy> copies, CudaStream stream) const {
  return run(KernelKind::copy, copies, {}, stream);
}

Status GpuKernels::scale(DType dtype, std::span<const GpuCopy> copies, Scale scale, CudaStream stream) const {
  const KernelKind kind = dtype == DType::float16 ? KernelKind::scale_float16 : KernelKind::scale_bfloat16;
  return run(kind, copies, scale, stream);
}

Status GpuKernels::run(KernelKind kind, std::span<const GpuCopy> copies, Scale scale, CudaStream stream) const {
  std::vector<KernelPiece> wide, narrow;
  for (const GpuCopy& copy : copies) {
    const auto addresses = reinterpret_cast<uintptr_t>(copy.from) | reinterpret_cast<uintptr_t>(copy.to);
    const int64_t in_wide_units = addresses % wide_unit ? 0 : copy.bytes / wide_unit * wide_unit;
    add_pieces(copy, 0, in_wide_units, wide_unit, wide);
    add_pieces(copy, in_wide_units, copy.bytes, narrow_unit(kind), narrow);
  }
  const auto& kernels = kernels_[static_cast<int>(kind)];
  SIRTAKI_TRY(launch(kernels[false], narrow, scale, stream));
  return launch(kernels[true], wide, scale, stream);
}

Status GpuKernels::launch(CudaKernel kernel, std::span<const KernelPiece> pieces, Scale scale,
                          CudaStream stream) const {
  KernelArgument argument{{}, static_cast<float>(scale.factor), static_cast<float>(scale.divisor)};
  while (!pieces.empty()) {
    const auto next = pieces.first(std::min(pieces.size(), std::size(argument.pieces)));
    std::copy(next.begin(), next.end(), argument.pieces);
    uint64_t longest = 1;
    for (const KernelPiece& piece : next) longest = std::max(longest, piece.units);
    const auto blocks = static_cast<unsigned>(std::min((longest + threads - 1) / threads, most_blocks));
    void* arguments[] = {&argument};  // which the driver copies
    SIRTAKI_TRY(device_.check(device_.cuda().kernel_launch(kernel, blocks, static_cast<unsigned>(next.size()), 1,
                                                           threads, 1, 1, 0, stream, arguments, nullptr),
                              "cuLaunchKernel"));
    pieces = pieces.subspan(next.size());
  }
  return Status::ok();
}

}  // namespace sirtaki
