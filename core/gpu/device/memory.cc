#include "gpu/device/memory.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>
#include <thread>

#include "base/clock.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds longest_close = seconds(1);  // for streams that still use memory
constexpr size_t smallest_block = 4 << 10, exact_from = 8 << 20;

// Rounds up to one of a few sizes, so that blocks can be reused: powers of two, but multiples of 8 MiB for large
// blocks, for which powers of two would waste much.
size_t capacity_for(size_t bytes) {
  if (bytes <= exact_from) return std::bit_ceil(std::max(bytes, smallest_block));
  return (bytes + exact_from - 1) / exact_from * exact_from;
}

}  // namespace

void MemoryBlock::give_back(GpuEventPtr after) {
  if (pool_) pool_->put_back(data_, capacity_, std::move(after));
  pool_ = nullptr;
}

// Frees all blocks, except those that a stream does not release in time, which remain until the process ends.
MemoryPool::~MemoryPool() {
  const GpuDevice::Scope scope(&device_);
  if (!scope.status().is_ok()) return;
  const Nanoseconds deadline = now() + longest_close;
  for (collect(); !waiting_.empty() && now() < deadline; collect())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  free_all();
}

Status MemoryPool::take(size_t bytes, MemoryBlock& out) {
  const MutexLock lock(mutex_);
  const size_t capacity = capacity_for(bytes);
  collect();
  if (take_free(bytes, 2 * capacity, out)) return Status::ok();
  const GpuDevice::Scope scope(&device_);
  SIRTAKI_TRY(scope.status());
  uint8_t* data = nullptr;
  CudaResult result = allocate(capacity, data);
  if (result == cuda_out_of_memory) {
    if (take_free(bytes, std::numeric_limits<size_t>::max(), out)) return Status::ok();
    if (may_free_()) {
      free_all();
      result = allocate(capacity, data);
    }
  }
  const char* what =
      place_ == MemoryKind::device ? "allocating memory on the GPU" : "allocating pinned memory on the host";
  SIRTAKI_TRY(device_.check(result, format("%s (%zu bytes)", what, capacity).c_str()));
  out = MemoryBlock(*this, data, capacity);
  return Status::ok();
}

// Takes the smallest free block that is large enough, of at most `most` bytes.
bool MemoryPool::take_free(size_t bytes, size_t most, MemoryBlock& out) {
  const auto found = free_.lower_bound(bytes);
  if (found == free_.end() || found->first > most) return false;
  out = MemoryBlock(*this, found->second, found->first);
  free_.erase(found);
  return true;
}

CudaResult MemoryPool::allocate(size_t bytes, uint8_t*& data) {
  if (place_ == MemoryKind::device) {
    CudaMemory address = 0;
    const CudaResult result = device_.cuda().memory_allocate(&address, bytes);
    data = reinterpret_cast<uint8_t*>(address);
    return result;
  }
  void* address = nullptr;
  const CudaResult result = device_.cuda().host_allocate(&address, bytes, cuda_memory_host_portable);
  data = static_cast<uint8_t*>(address);
  return result;
}

void MemoryPool::put_back(uint8_t* data, size_t capacity, GpuEventPtr after) {
  const MutexLock lock(mutex_);
  if (after) waiting_.push_back({data, capacity, std::move(after)});
  else free_.emplace(capacity, data);
}

// Moves blocks whose events have fired to the free list. On a GPU that has failed, they never fire.
void MemoryPool::collect() {
  size_t kept = 0;
  for (Waiting& block : waiting_) {
    bool has_fired = false;
    if (block.after->look(has_fired).is_ok() && has_fired) free_.emplace(block.capacity, block.data);
    else std::swap(waiting_[kept++], block);
  }
  waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(kept), waiting_.end());
}

void MemoryPool::free_all() {
  for (const auto& [capacity, data] : free_) {
    if (place_ == MemoryKind::device) std::ignore = device_.cuda().memory_free(reinterpret_cast<CudaMemory>(data));
    else std::ignore = device_.cuda().host_free(data);
  }
  free_.clear();
}

}  // namespace sirtaki
