// The arena: memory for tensors themselves that the ranks of one host share. It follows the shared region in the same
// descriptor and has a section per rank, from which only that rank allocates. All ranks map all sections, so that a
// collective can read and write tensors where they are, without a copy in between.
//
// The arena is sparse, and is mapped by the first allocation: a rank that allocates nothing pays nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "base/status.h"
#include "base/system/descriptor.h"

namespace sirtaki {

// Allocates all pages of a part of a memory file. Returns 0, or the number of the system's error.
int allocate_pages(int fd, int64_t begin, int64_t bytes);

// Addresses that are unmapped at the end.
class Mapping {
 public:
  // SRT_UNSUPPORTED: this process may not map so much (ulimit -v).
  static Status open(int fd, int64_t offset, int64_t bytes, Mapping& out);
  Mapping() = default;
  Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  uint8_t* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }

 private:
  std::span<uint8_t> bytes_;
};

// The place of the arena in the descriptor.
struct ArenaPlace {
  int64_t begin = 0;
  int64_t section_bytes = 0;  // of each rank; 0: there is no arena
};

// The section of this rank. It outlives the rank while a buffer in it is in use.
class ArenaSection {
 public:
  static constexpr int64_t most_listed = 8192;  // entries of the directory, which opens the section

  static Status open(int fd, const ArenaPlace& place, int slot, std::shared_ptr<ArenaSection>& out);

  // Allocates zeroed memory at the beginning of a page; fails if the operating system has none left.
  Status allocate(int64_t bytes, int64_t& offset);
  void free(int64_t offset, int64_t bytes);
  // In a forked child: from now on, what the child writes into this memory does not reach the ranks.
  void keep_private(int64_t offset, int64_t bytes);

  uint8_t* at(int64_t offset) const { return mapping_.data() + offset; }
  // Returns the offset of memory that lies in the section with all its bytes, else -1.
  int64_t offset_of(const void* memory, int64_t bytes) const;
  uint64_t* directory() const { return reinterpret_cast<uint64_t*>(mapping_.data()); }

 private:
  ArenaSection(Descriptor memory, int64_t begin, Mapping mapping);

  Descriptor memory_;
  int64_t begin_;  // of the section in the descriptor
  Mapping mapping_;
  std::mutex lock_;
  std::map<int64_t, int64_t> free_;  // bytes by offset
};

// Memory in a section, freed at the end. In a forked child it is left alone, because it belongs to the parent.
class SharedBuffer {
 public:
  SharedBuffer(std::shared_ptr<ArenaSection> section, int64_t offset, int64_t bytes);
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;
  uint8_t* data() const { return section_->at(offset_); }
  void fork_child() { section_->keep_private(offset_, bytes_); }

 private:
  std::shared_ptr<ArenaSection> section_;
  int64_t offset_, bytes_;
  int pid_;
};

class SharedArena {
 public:
  // Duplicates the descriptor.
  SharedArena(int fd, const ArenaPlace& place, int slots, int own_slot);

  bool exists() const { return place_.section_bytes > 0; }  // the same on all ranks of a host
  Status allocate(int64_t bytes, std::unique_ptr<SharedBuffer>& out);

  // Returns this rank's section; nullptr before the first allocation.
  ArenaSection* own() const { return own_in_use_.load(std::memory_order_acquire); }
  // Returns the section of a slot, once this rank has its own.
  uint8_t* section(int slot) const { return all_.data() + slot * place_.section_bytes; }
  int64_t section_bytes() const { return place_.section_bytes; }

  void close() { all_ = Mapping(); }  // buffers remain

 private:
  Status map();

  Descriptor memory_;
  ArenaPlace place_;
  int slots_, own_slot_;
  std::mutex lock_;
  Mapping all_;
  std::shared_ptr<ArenaSection> own_;
  std::atomic<ArenaSection*> own_in_use_{nullptr};
};

}  // namespace sirtaki
