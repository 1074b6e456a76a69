// Queues of bytes to be received and sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

namespace sirtaki {

// A queue of bytes whose front is consumed and whose end is filled in place.
class ByteQueue {
 public:
  std::span<const uint8_t> front() const { return {bytes_.get() + begin_, end_ - begin_}; }
  size_t size() const { return end_ - begin_; }
  void consume(size_t count);
  std::span<uint8_t> extend(size_t count);      // uninitialised space at the end, part of the queue at once
  std::span<uint8_t> room(size_t at_least);     // free space behind the end; commit() makes it part of the queue
  void commit(size_t count) { end_ += count; }

 private:
  void make_room(size_t count);

  std::unique_ptr<uint8_t[]> bytes_;
  size_t capacity_ = 0, begin_ = 0, end_ = 0;
};

// A queue of its own bytes and of others that lie elsewhere, in order.
class SendQueue {
 public:
  std::span<uint8_t> extend(size_t count);
  void refer(std::span<const uint8_t> bytes);

  size_t size() const { return size_; }
  std::span<const uint8_t> front() const;  // returns a part, empty only if the queue is
  void consume(size_t count);
  void clear();

  // Copies the bytes that lie elsewhere: their owner needs the memory back.
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
