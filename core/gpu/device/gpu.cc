#include "gpu/device/gpu.h"

#include <algorithm>
#include <vector>

#include "base/clock.h"

namespace sirtaki {
namespace {

// Kept for the small tensors that an operation gathers. A framework's own pool holds nearly all memory later on, of
// which the driver gives none away. The small tensors of ResNet-50 and BERT-large need 1 to 2 MB.
constexpr size_t reserved_bytes = 8 << 20;
// A driver of CUDA 13.0 is reported to crash in batches of tens of thousands of copies, and to hang in repeated
// copies from and to the host: https://github.com/vllm-project/vllm/issues/49276.
constexpr size_t longest_batch = 512;
constexpr Nanoseconds longest_look = milliseconds(500);  // an event in an idle stream fires as soon as a core is free

}  // namespace

Status Gpu::open(const GpuLibraries& libraries, int ordinal, std::unique_ptr<Gpu>& out) {
  std::unique_ptr<GpuDevice> device;
  SIRTAKI_TRY(GpuDevice::open(libraries, ordinal, device));
  std::unique_ptr<Gpu> gpu(new Gpu(std::move(device)));
  SIRTAKI_TRY(gpu->start());
  MemoryBlock reserved;
  const Status taken = gpu->memory_.take(reserved_bytes, reserved);
  if (!taken.is_ok() && taken.code() != SRT_OUT_OF_MEMORY) return taken;  // operations may need no memory
  out = std::move(gpu);
  return Status::ok();
}

Gpu::Gpu(std::unique_ptr<GpuDevice> device)
    : device_(std::move(device)), events_(*device_),
      memory_(*device_, MemoryPool::MemoryKind::device, [this] { return is_idle(); }),
      pinned_(*device_, MemoryPool::MemoryKind::host, [this] { return is_idle(); }), kernels_(*device_) {}

Gpu::~Gpu() {
  const GpuDevice::Scope scope(device_.get());
  if (!scope.status().is_ok()) return;
  for (CudaStream stream : {launches_, copies_})
    if (stream) std::ignore = device_->cuda().stream_destroy(stream);
}

// Creates the streams, with the greatest priority, because other ranks wait for their work; and loads the kernels.
Status Gpu::start() {
  const GpuDevice::Scope scope(device_.get());
  SIRTAKI_TRY(scope.status());
  const CudaFunctions& cuda = device_->cuda();
  int least = 0, greatest = 0;
  SIRTAKI_TRY(device_->check(cuda.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange"));
  for (CudaStream* stream : {&launches_, &copies_})
    SIRTAKI_TRY(
        device_->check(cuda.stream_create(stream, cuda_stream_non_blocking, greatest), "cuStreamCreateWithPriority"));
  kernels_.load(launches_);
  return Status::ok();
}

bool Gpu::is_idle() {
  GpuEventPtr end;
  bool has_come = false;
  Status status = events_.record(launches_, end);
  for (const Nanoseconds deadline = now() + longest_look; status.is_ok() && !has_come && now() < deadline;)
    status = end->look(has_come);
  return has_come;
}

Status Gpu::copy(const GpuCopy& copy, CudaStream stream) const {
  return device_->check(
      device_->cuda().copy(reinterpret_cast<CudaMemory>(copy.to), reinterpret_cast<CudaMemory>(copy.from),
                           static_cast<size_t>(copy.bytes), stream),
      "cuMemcpyAsync");
}

Status Gpu::copy_all(std::span<const GpuCopy> copies, CudaStream stream) const {
  if (copies.size() > 1 && !device_->cuda().copy_batch && kernels_.status().is_ok())
    return kernels_.copy(copies, stream);
  const size_t most = device_->cuda().copy_batch ? longest_batch : 1;
  for (; !copies.empty(); copies = copies.subspan(std::min(most, copies.size()))) {
    const auto next = copies.first(std::min(most, copies.size()));
    SIRTAKI_TRY(next.size() == 1 ? copy(next.front(), stream) : copy_batch(next, stream));
  }
  return Status::ok();
}

Status Gpu::copy_batch(std::span<const GpuCopy> copies, CudaStream stream) const {
  std::vector<CudaMemory> to, from;
  std::vector<size_t> bytes;
  for (const GpuCopy& copy : copies) {
    to.push_back(reinterpret_cast<CudaMemory>(copy.to));
    from.push_back(reinterpret_cast<CudaMemory>(copy.from));
    bytes.push_back(static_cast<size_t>(copy.bytes));
  }
  CudaCopyAttributes attributes;
  size_t first = 0, failed = 0;
  return device_->check(device_->cuda().copy_batch(to.data(), from.data(), bytes.data(), copies.size(), &attributes,
                                                   &first, 1, &failed, stream),
                        "cuMemcpyBatchAsync");
}

Status GpuOutput::allocate(Gpu& gpu, size_t bytes, std::unique_ptr<GpuOutput>& out) {
  std::unique_ptr<GpuOutput> made(new GpuOutput(gpu));
  SIRTAKI_TRY(gpu.memory().take(bytes, made->block_));
  out = std::move(made);
  return Status::ok();
}

GpuOutput::~GpuOutput() {
  if (after_) block_.give_back(std::move(after_));
  else if (is_used_) block_.abandon();
}

void GpuOutput::release() {
  if (is_used_) std::ignore = gpu_.events().record(stream_, after_);
}

Status GpuChoice::choose(int32_t ordinal) {
  const MutexLock lock(mutex_);
  if (gpu_) {
    if (gpu_->device().ordinal() == ordinal) return Status::ok();
    return {SRT_INVALID_ARGUMENT,
            format("this rank works on GPU %d, and this tensor is on GPU %d: each rank works on one GPU. In PyTorch, "
                   "torch.cuda.set_device(hvd.local_rank()) before anything else chooses it",
                   gpu_->device().ordinal(), ordinal)};
  }
  SIRTAKI_TRY(open_libraries());
  if (ordinal >= libraries_->device_count())
    return {SRT_INVALID_ARGUMENT,
            format("there is no GPU %d; this process sees %d", ordinal, libraries_->device_count())};
  if (const Status opened = Gpu::open(*libraries_, ordinal, gpu_); !opened.is_ok())
    return {SRT_UNSUPPORTED, format("GPU %d cannot be used: %s", ordinal, opened.text())};
  chosen_.store(gpu_.get(), std::memory_order_release);
  return Status::ok();
}

Status GpuChoice::find(uintptr_t address, int32_t& ordinal) {
  const MutexLock lock(mutex_);
  SIRTAKI_TRY(open_libraries());
  const CudaResult found = libraries_->cuda().pointer_attribute(&ordinal, cuda_device_of_pointer, address);
  return libraries_->check(found, "cuPointerGetAttribute");
}

Status GpuChoice::open_libraries() {
  if (!libraries_) {
    const auto calls = std::make_shared<RunningCalls>();
    watch_ = std::make_unique<CallWatch>(calls, rank_, log_, config_.time(Knob::stall_report));
    libraries_ = std::make_unique<GpuLibraries>(config_, calls);
  }
  if (libraries_->has_cuda()) return Status::ok();
  return {SRT_UNSUPPORTED,
          format("a tensor on a GPU needs the CUDA driver: %s", libraries_->found_cuda().text.c_str())};
}

void GpuChoice::forked() {
  chosen_ = nullptr;
  std::ignore = gpu_.release();
  std::ignore = libraries_.release();
  std::ignore = watch_.release();
}

}  // namespace sirtaki
