// Pools of memory on a GPU, or of pinned memory on the host (which a GPU copies by itself). Memory is reused, because
// an allocation may wait for all work on the GPU.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/thread_safety.h"
#include "gpu/device/events.h"

namespace sirtaki {

class MemoryPool;

// A block of a pool, returned to the pool on destruction; empty without a pool.
class MemoryBlock {
 public:
  MemoryBlock() = default;
  MemoryBlock(MemoryPool& pool, uint8_t* data, size_t capacity) : pool_(&pool), data_(data), capacity_(capacity) {}
  MemoryBlock(MemoryBlock&& other) noexcept { swap(other); }
  MemoryBlock& operator=(MemoryBlock&& other) noexcept {
    MemoryBlock(std::move(other)).swap(*this);
    return *this;
  }
  ~MemoryBlock() { give_back(nullptr); }

  uint8_t* data() const { return data_; }

  // Returns the block to the pool, which reuses it once the event has fired.
  void give_back(GpuEventPtr after);
  // Gives up the block, which is neither reused nor freed, because a GPU that has failed may still write to it.
  void abandon() { pool_ = nullptr; }

 private:
  void swap(MemoryBlock& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
  }

  MemoryPool* pool_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t capacity_ = 0;
};

class MemoryPool {
 public:
  enum class MemoryKind { device, host };

  // `may_free` returns whether the GPU has no work of this rank that waits for other ranks: a free waits for all work.
  MemoryPool(const GpuDevice& device, MemoryKind place, std::function<bool()> may_free)
      : device_(device), place_(place), may_free_(std::move(may_free)) {}
  ~MemoryPool();

  // Takes a block of at least this many bytes, aligned to 256. The pool must outlive the block.
  Status take(size_t bytes, MemoryBlock& out);

 private:
  friend class MemoryBlock;
  struct Waiting {
    uint8_t* data;
    size_t capacity;
    GpuEventPtr after;
  };

  void put_back(uint8_t* data, size_t capacity, GpuEventPtr after);
  bool take_free(size_t bytes, size_t most, MemoryBlock& out) REQUIRES(mutex_);
  void collect() REQUIRES(mutex_);
  void free_all() REQUIRES(mutex_);
  CudaResult allocate(size_t bytes, uint8_t*& data);

  const GpuDevice& device_;
  const MemoryKind place_;
  const std::function<bool()> may_free_;
  Mutex mutex_;
  std::multimap<size_t, uint8_t*> free_ GUARDED_BY(mutex_);  // by capacity
  std::vector<Waiting> waiting_ GUARDED_BY(mutex_);
};

}  // namespace sirtaki
