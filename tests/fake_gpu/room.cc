#include "fake_gpu/room.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace fake {

size_t Channel::write(const char* data, size_t bytes) {
  const uint64_t written = written_.load();
  const size_t count = std::min<size_t>(bytes, capacity - (written - read_.load()));
  const size_t at = written % capacity, first = std::min(count, capacity - at);
  std::memcpy(bytes_ + at, data, first);
  std::memcpy(bytes_, data + first, count - first);
  written_.store(written + count);
  return count;
}

size_t Channel::read(char* data, size_t bytes) {
  const uint64_t read = read_.load();
  const size_t count = std::min<size_t>(bytes, written_.load() - read);
  const size_t at = read % capacity, first = std::min(count, capacity - at);
  std::memcpy(data, bytes_ + at, first);
  std::memcpy(data + first, bytes_, count - first);
  read_.store(read + count);
  return count;
}

bool Room::make_id(sirtaki::NcclUniqueId& out) {
  const int descriptor = ::memfd_create("fake_nccl", MFD_CLOEXEC);  // stays open: other ranks may arrive at any time
  out = {};
  std::snprintf(out.bytes, sizeof out.bytes, "/proc/%d/fd/%d", ::getpid(), descriptor);
  return descriptor >= 0;
}

std::shared_ptr<Room> Room::enter(const sirtaki::NcclUniqueId& id, int size) {
  const int descriptor = ::open(id.bytes, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  const size_t bytes = bytes_for(size);
  void* memory = MAP_FAILED;
  if (::ftruncate(descriptor, static_cast<off_t>(bytes)) == 0)
    memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  return memory == MAP_FAILED ? nullptr : std::shared_ptr<Room>(new Room(memory, size));
}

Room::~Room() { ::munmap(memory_, bytes_for(size_)); }

bool Room::all(std::atomic<bool> Seat::* have) {
  return std::all_of(seats(), seats() + size_, [&](const Seat& seat) { return (seat.*have).load(); });
}

}  // namespace fake
