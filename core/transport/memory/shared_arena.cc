#include "transport/memory/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/system/machine.h"

namespace sirtaki {
namespace {

constexpr int64_t directory_bytes = ArenaSection::most_listed * static_cast<int64_t>(sizeof(uint64_t));

Status no_memory(int64_t bytes, const char* why) {
  return {SRT_OUT_OF_MEMORY,
          format("%lld bytes of shared memory could not be allocated: %s", static_cast<long long>(bytes), why)};
}

int64_t whole_pages(int64_t bytes) {
  const int64_t page = page_bytes();
  return std::max((bytes + page - 1) / page * page, page);
}

}  // namespace

// Goes in steps of less than a millisecond: some kernels undo an allocation that a signal interrupts.
int allocate_pages(int fd, int64_t begin, int64_t bytes) {
  constexpr int64_t most = 1 << 20;
  for (int64_t done = 0; done < bytes;) {
    const int64_t step = std::min(bytes - done, most);
    const int error = ::posix_fallocate(fd, begin + done, step);
    if (error && error != EINTR) return error;
    if (!error) done += step;
  }
  return 0;
}

Status Mapping::open(int fd, int64_t offset, int64_t bytes, Mapping& out) {
  const auto size = static_cast<size_t>(bytes);
  void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
  if (mapped == MAP_FAILED)
    return {SRT_UNSUPPORTED, format("shared memory cannot be mapped: %s", std::strerror(errno))};
  out.bytes_ = {static_cast<uint8_t*>(mapped), size};
  return Status::ok();
}

Mapping::~Mapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

ArenaSection::ArenaSection(Descriptor memory, int64_t begin, Mapping mapping)
    : memory_(std::move(memory)), begin_(begin), mapping_(std::move(mapping)) {
  free_.emplace(directory_bytes, static_cast<int64_t>(mapping_.size()) - directory_bytes);
}

Status ArenaSection::open(int fd, const ArenaPlace& place, int slot, std::shared_ptr<ArenaSection>& out) {
  const int64_t begin = place.begin + slot * place.section_bytes;
  Descriptor memory = Descriptor::duplicate(fd);
  Mapping mapping;
  SIRTAKI_TRY(Mapping::open(memory.get(), begin, place.section_bytes, mapping));
  if (const int error = allocate_pages(memory.get(), begin, directory_bytes))
    return no_memory(directory_bytes, std::strerror(error));
  out.reset(new ArenaSection(std::move(memory), begin, std::move(mapping)));
  return Status::ok();
}

Status ArenaSection::allocate(int64_t bytes, int64_t& offset) {
  const std::lock_guard guard(lock_);
  if (bytes > static_cast<int64_t>(mapping_.size())) return no_memory(bytes, "it is more than a rank may share");
  const int64_t size = whole_pages(bytes);
  const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& hole) { return hole.second >= size; });
  if (found == free_.end()) return no_memory(bytes, "this rank's share of the host's memory is in use");
  // Allocates the pages now: a lack of memory is an error here instead of a SIGBUS during training.
  if (const int error = allocate_pages(memory_.get(), begin_ + found->first, size))
    return no_memory(bytes, std::strerror(error));
  offset = found->first;
  const int64_t rest = found->second - size;
  free_.erase(found);
  if (rest > 0) free_.emplace(offset + size, rest);
  return Status::ok();
}

void ArenaSection::free(int64_t offset, int64_t bytes) {
  const std::lock_guard guard(lock_);
  int64_t size = whole_pages(bytes);
  ::fallocate(memory_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin_ + offset, size);
  auto next = free_.upper_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

void ArenaSection::keep_private(int64_t offset, int64_t bytes) {
  const auto size = static_cast<size_t>(whole_pages(bytes));
  constexpr int in_place = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  if (::mmap(at(offset), size, PROT_READ | PROT_WRITE, in_place, memory_.get(), begin_ + offset) != MAP_FAILED) return;
  // Makes a use of it end the child, rather than change what ranks exchange.
  ::mmap(at(offset), size, PROT_NONE, in_place | MAP_ANONYMOUS, -1, 0);
}

int64_t ArenaSection::offset_of(const void* memory, int64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(mapping_.data()), at = reinterpret_cast<uintptr_t>(memory);
  const bool is_inside =
      at >= begin && at - begin <= mapping_.size() && static_cast<uintptr_t>(bytes) <= mapping_.size() - (at - begin);
  return is_inside ? static_cast<int64_t>(at - begin) : -1;
}

SharedBuffer::SharedBuffer(std::shared_ptr<ArenaSection> section, int64_t offset, int64_t bytes)
    : section_(std::move(section)), offset_(offset), bytes_(bytes), pid_(::getpid()) {}

SharedBuffer::~SharedBuffer() {
  if (pid_ == ::getpid()) section_->free(offset_, bytes_);
}

SharedArena::SharedArena(int fd, const ArenaPlace& place, int slots, int own_slot)
    : memory_(Descriptor::duplicate(fd)), place_(place), slots_(slots), own_slot_(own_slot) {}

Status SharedArena::map() {
  Mapping all;
  SIRTAKI_TRY(Mapping::open(memory_.get(), place_.begin, slots_ * place_.section_bytes, all));
  SIRTAKI_TRY(ArenaSection::open(memory_.get(), place_, own_slot_, own_));
  all_ = std::move(all);
  own_in_use_.store(own_.get(), std::memory_order_release);
  return Status::ok();
}

Status SharedArena::allocate(int64_t bytes, std::unique_ptr<SharedBuffer>& out) {
  if (!exists()) return {SRT_UNSUPPORTED, "the ranks of this host share no memory for tensors"};
  const std::lock_guard guard(lock_);
  if (!own_) SIRTAKI_TRY(map());
  int64_t offset = 0;
  SIRTAKI_TRY(own_->allocate(bytes, offset));
  out = std::make_unique<SharedBuffer>(own_, offset, bytes);
  return Status::ok();
}

}  // namespace sirtaki
