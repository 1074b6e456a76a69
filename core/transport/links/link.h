// A Link carries frames to and from one peer, in order, and never blocks. Its transport (sockets, or a ring in shared
// memory) is a BytePipe; framing, bounds and queues are common to all transports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "transport/links/byte_queue.h"
#include "transport/links/sent_bytes.h"

namespace sirtaki {

// The kinds of frames. A frame is one message on a link: a fixed header, then `length` bytes.
// aggregate: a leader's report for its subtree. cut_off: a rank on the path to the coordinator has left, so no more
// Decisions come.
enum class FrameKind : uint16_t { report = 1, aggregate, decision, abort, goodbye, cut_off, data };

struct FrameHeader {
  uint32_t length = 0;
  FrameKind kind = FrameKind::data;
  uint16_t step = 0;   // data: index of the plan's transfer (wraps), to detect a loss of synchronization
  uint64_t plan = 0;   // data: the plan's number
};
static_assert(sizeof(FrameHeader) == 16);

// The longest accepted body. A report of 8,192 new tensors is far below it.
constexpr uint32_t longest_frame = 64u << 20;

// Returns the padded length of a body on the wire, so that every body is aligned for any element type.
constexpr size_t padded(size_t length) { return (length + 15) / 16 * 16; }

struct Frame {
  FrameHeader header;
  std::span<const uint8_t> body;
};

class BytePipe {
 public:
  virtual ~BytePipe() = default;

  // Return the number of bytes moved, 0 if none can move now, -1 if the other end is gone. `more`: further bytes
  // follow at once.
  virtual ptrdiff_t write(std::span<const uint8_t> bytes, bool more) = 0;
  virtual ptrdiff_t read(std::span<uint8_t> bytes) = 0;

  virtual Transport transport() const { return Transport::ring; }
  virtual bool readable() const { return false; }               // shared memory: bytes are waiting to be read
  virtual bool holds_inbound() const { return false; }          // bytes that its descriptors no longer show
  virtual std::vector<int> descriptors() const { return {}; }   // to sleep on; empty: a doorbell is used instead
  virtual void end_writing() {}                                 // the other end then reads end-of-stream
  virtual bool is_delivered() const { return true; }            // everything written has reached the other machine
  virtual Nanoseconds silence() const { return 0; }             // how long that machine has owed an answer
  virtual void probe() const {}                                 // asks that machine for an answer at once
  virtual bool is_polled() const { return false; }  // nothing wakes a rank for it: neither descriptor nor doorbell

  // Pipes that are polled: advance what is in flight, and return whether that is still possible; send nothing more;
  // move nothing more.
  virtual bool progress() { return true; }
  virtual void stop_sending() {}
  virtual void give_up() {}
  virtual std::string trouble() const { return {}; }  // why nothing can be moved any more
};

class Link {
 public:
  // `sent` counts the bytes that the pipe takes, and must outlive the link; nullptr: nobody counts them.
  explicit Link(std::unique_ptr<BytePipe> pipe, SentCounter* sent = nullptr) : pipe_(std::move(pipe)), sent_(sent) {}

  // Queues a frame; returns the space for its body, to be filled before the next call.
  std::span<uint8_t> compose(FrameHeader header);
  void send(FrameHeader header, std::span<const uint8_t> body);

  // Queue a frame in parts: its header, then parts that add up to its length. A part is space to be filled before the
  // next call, or memory elsewhere, which is not copied and must not change until unsent() is 0 or drop_references()
  // is called.
  void begin(FrameHeader header);
  std::span<uint8_t> add(size_t bytes);
  void add_elsewhere(std::span<const uint8_t> bytes);

  size_t unsent() const { return out_.size(); }
  uint64_t frames_queued() const { return frames_queued_; }  // since the link exists
  uint64_t frames_taken() const { return frames_taken_; }    // likewise
  bool readable() const { return pipe_->readable(); }
  bool holds_inbound() const { return pipe_->holds_inbound(); }
  // Notes whether there may be bytes to receive: otherwise receive() does not ask the pipe.
  void note_inbound(bool may_be_there) { may_receive_ = may_be_there; }
  bool may_receive() const { return may_receive_; }
  bool is_polled() const { return pipe_->is_polled(); }
  void progress() {
    if (!pipe_->progress()) ended_ = true;
  }
  void stop_sending() { pipe_->stop_sending(); }
  void give_up() { pipe_->give_up(); }
  std::string trouble() const { return pipe_->trouble(); }
  std::vector<int> descriptors() const { return pipe_->descriptors(); }
  bool is_ended() const { return ended_; }  // the other end is gone, and everything that it sent has been read

  // Sends queued bytes; returns whether any moved.
  bool flush();
  // Receives bytes; returns whether any arrived.
  bool receive();
  // Returns the oldest complete frame, or nullptr. Fails if the bytes are malformed; the link is then unusable.
  Status front(const Frame*& out);
  void pop();

  // Reads the body of the next frame directly to `where` if the frame has this header. Has no effect on bodies that
  // need padding or that have arrived already. Valid until a frame is popped.
  void place(const FrameHeader& header, std::span<uint8_t> where);

  // Stops all use of memory elsewhere, for reading and writing. Nothing can be received afterwards.
  void drop_references();

  // Ends writing after this side's last frame. The link should not be destroyed before that frame has arrived.
  void end_writing();
  bool is_delivered() const { return !unsent() && pipe_->is_delivered(); }

  // Returns how long the peer's machine has been silent although it should answer; 0 if it has nothing to answer.
  Nanoseconds silence() const { return pipe_->silence(); }
  void probe() const { pipe_->probe(); }

  Link(Link&&) = default;

 private:
  void pad();
  bool receive_placed();
  bool begins_placed_frame();

  std::unique_ptr<BytePipe> pipe_;
  SentCounter* sent_;
  SendQueue out_;
  size_t missing_ = 0, padding_ = 0;  // bytes of the frame that is queued in parts
  ByteQueue in_;
  Frame frame_;
  bool has_frame_ = false;
  bool ended_ = false, unwritable_ = false, may_receive_ = true;
  uint64_t frames_queued_ = 0, frames_taken_ = 0;

  // The destination of the next frame's body, if the frame has this header.
  FrameHeader placed_header_;
  std::span<uint8_t> place_;
  size_t placed_ = 0;        // bytes received
  bool is_placing_ = false;  // the frame's header has arrived
};

}  // namespace sirtaki
