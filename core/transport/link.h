// A Link carries frames to and from one peer, in order, and never blocks. What a Link is made of (a socket, a
// ring in shared memory) is a BytePipe; framing, bounds and queues are the same for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "transport/frame.h"

namespace sirtaki {

class BytePipe {
 public:
  virtual ~BytePipe() = default;

  // How many bytes moved, 0 if none can now, -1 if the other end is gone.
  virtual ptrdiff_t write(std::span<const uint8_t> bytes) = 0;
  virtual ptrdiff_t read(std::span<uint8_t> bytes) = 0;

  virtual bool readable() const { return false; }  // shared memory: bytes wait to be read
  virtual int descriptor() const { return -1; }    // to sleep on; -1: a doorbell is rung instead
};

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

class Link {
 public:
  explicit Link(std::unique_ptr<BytePipe> pipe) : pipe_(std::move(pipe)) {}

  // Queues a frame; the returned space is its body, to be filled before the next call.
  std::span<uint8_t> compose(FrameHeader header);
  void send(FrameHeader header, std::span<const uint8_t> body);

  size_t unsent() const { return out_.size(); }
  bool readable() const { return pipe_->readable(); }
  int descriptor() const { return pipe_->descriptor(); }
  bool is_ended() const { return ended_; }  // the other end is gone, and everything that it had sent is read

  // Moves queued bytes on; true if any moved.
  bool flush();
  // Takes bytes in; true if any came.
  bool receive();
  // The oldest complete frame, or nullptr. Not ok: the bytes make no sense, the link is useless.
  Status front(const Frame*& out);
  void pop();

  Link(Link&&) = default;

 private:
  std::unique_ptr<BytePipe> pipe_;
  ByteQueue out_, in_;
  Frame frame_;
  bool has_frame_ = false;
  bool ended_ = false, unwritable_ = false;
};

}  // namespace sirtaki
