// The meeting point of a communicator's ranks: memory that they share, whether they are threads or processes. It is a
// nameless file of the process that made the unique id, which tells where to find it, so nothing is left behind,
// however that process ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "gpu/libraries/nccl.h"

namespace fake {

// Bytes in transit from one rank to another. One rank writes, one reads; neither waits.
class Channel {
 public:
  size_t write(const char* data, size_t bytes);  // returns how many there was room for
  size_t read(char* data, size_t bytes);         // returns how many there were

 private:
  static constexpr size_t capacity = 1 << 16;
  std::atomic<uint64_t> written_, read_;
  char bytes_[capacity];
};

class Room {
 public:
  struct Seat {
    std::atomic<bool> is_taken, is_leaving;
    int device, version;
    uint64_t host;
  };

  static bool make_id(sirtaki::NcclUniqueId& out);
  static std::shared_ptr<Room> enter(const sirtaki::NcclUniqueId&, int size);  // null: there is no such room
  ~Room();

  int size() const { return size_; }
  Seat& seat(int rank) { return seats()[rank]; }
  bool all(std::atomic<bool> Seat::* have);  // is_taken, is_leaving
  Channel& channel(int from, int to) { return channels()[from * size_ + to]; }

 private:
  Room(void* memory, int size) : memory_(static_cast<char*>(memory)), size_(size) {}
  static constexpr size_t seats_bytes = 4096;
  static size_t bytes_for(int size) {
    return seats_bytes + sizeof(Channel) * static_cast<size_t>(size) * static_cast<size_t>(size);
  }
  Seat* seats() { return reinterpret_cast<Seat*>(memory_); }
  Channel* channels() { return reinterpret_cast<Channel*>(memory_ + seats_bytes); }

  char* memory_;  // zeros at first
  int size_;
};

}  // namespace fake
