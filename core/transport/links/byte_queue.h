// Queues of received bytes and of bytes to be sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

namespace sirtaki {

// A queue of bytes that is consumed at the front and filled in place at the end.
class ByteQueue {
 public:
  std::span<const uint8_t> front() const { return {bytes_.get() + begin_, end_ - begin_}; }
  size_t size() const { return end_ - begin_; }
  void consume(size_t count);
  std::span<uint8_t> extend(size_t count);      // appends uninitialised space, which is part of the queue at once
  std::span<uint8_t> room(size_t at_least);     // free space after the end; commit() makes it part of the queue
  void commit(size_t count) { end_ += count; }

 private:
  void make_room(size_t count);

  std::unique_ptr<uint8_t[]> bytes_;
  size_t capacity_ = 0, begin_ = 0, end_ = 0;
};

// A queue of bytes of its own and bytes in memory elsewhere, in order.
class SendQueue {
 public:
  std::span<uint8_t> extend(size_t count);
  void refer(std::span<const uint8_t> bytes);

  size_t size() const { return size_; }
  std::span<const uint8_t> front() const;  // may be only a part; empty only if the queue is
  void consume(size_t count);
  void clear();

  // Copies the bytes elsewhere into the queue, because their owner needs the memory back.
  void keep();

 private:
  struct Span {
    const uint8_t* elsewhere;  // nullptr: in own_
    size_t bytes;
  };

  ByteQueue own_;
  std::deque<Span> spans_;
  size_t size_ = 0;
};

}  // namespace sirtaki
