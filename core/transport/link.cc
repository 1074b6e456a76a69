#include "transport/link.h"

#include <algorithm>
#include <cstring>

namespace sirtaki {
namespace {

constexpr size_t read_ahead = 256 << 10;  // bytes taken in beyond the frame that is awaited

}  // namespace

void ByteQueue::consume(size_t count) {
  begin_ += count;
  if (begin_ == end_) begin_ = end_ = 0;
}

std::span<uint8_t> ByteQueue::extend(size_t count) {
  const std::span<uint8_t> space = room(count).first(count);
  commit(count);
  return space;
}

std::span<uint8_t> ByteQueue::room(size_t at_least) {
  if (capacity_ - end_ < at_least) make_room(at_least);
  return {bytes_.get() + end_, capacity_ - end_};
}

void ByteQueue::make_room(size_t count) {
  const size_t used = size();
  if (capacity_ - used >= count && begin_ >= used) {  // moving is cheap: the halves do not overlap
    std::memcpy(bytes_.get(), bytes_.get() + begin_, used);
  } else {
    capacity_ = std::max({2 * capacity_, used + count, size_t{4096}});
    auto bigger = std::make_unique_for_overwrite<uint8_t[]>(capacity_);
    if (used) std::memcpy(bigger.get(), bytes_.get() + begin_, used);
    bytes_ = std::move(bigger);
  }
  begin_ = 0;
  end_ = used;
}

std::span<uint8_t> Link::compose(FrameHeader header) {
  const std::span<uint8_t> space = out_.extend(sizeof header + padded(header.length));
  std::memcpy(space.data(), &header, sizeof header);
  const std::span<uint8_t> body = space.subspan(sizeof header);
  std::fill(body.begin() + header.length, body.end(), uint8_t{0});
  return body.first(header.length);
}

void Link::send(FrameHeader header, std::span<const uint8_t> body) {
  header.length = static_cast<uint32_t>(body.size());
  const std::span<uint8_t> space = compose(header);
  if (!body.empty()) std::memcpy(space.data(), body.data(), body.size());
}

bool Link::flush() {
  bool moved = false;
  while (out_.size()) {
    const ptrdiff_t written = unwritable_ ? -1 : pipe_->write(out_.front());
    if (written < 0) {  // reading will tell what happened, and bring the last words
      unwritable_ = true;
      out_.consume(out_.size());
    }
    if (written <= 0) break;
    out_.consume(static_cast<size_t>(written));
    moved = true;
  }
  return moved;
}

bool Link::receive() {
  // Bytes are left in the pipe while a whole frame waits here: that holds back a peer that is ahead.
  const Frame* ready = nullptr;
  if (ended_ || !front(ready).is_ok() || ready) return false;
  const size_t frame_bytes = in_.size() >= sizeof(FrameHeader) ? sizeof(FrameHeader) + padded(frame_.header.length) : 0;
  const size_t wanted = std::max(frame_bytes > in_.size() ? frame_bytes - in_.size() : 0, read_ahead);
  const ptrdiff_t count = pipe_->read(in_.room(wanted));
  if (count < 0) ended_ = true;
  if (count <= 0) return false;
  in_.commit(static_cast<size_t>(count));
  return true;
}

Status Link::front(const Frame*& out) {
  out = nullptr;
  if (!has_frame_) {
    if (in_.size() < sizeof(FrameHeader)) return Status::ok();
    std::memcpy(&frame_.header, in_.front().data(), sizeof(FrameHeader));
    const auto kind = static_cast<uint16_t>(frame_.header.kind);
    if (frame_.header.length > longest_frame || kind < static_cast<uint16_t>(FrameKind::report) ||
        kind > static_cast<uint16_t>(FrameKind::data))
      return {SRT_PROTOCOL, "a frame with an impossible header arrived"};
    if (in_.size() < sizeof(FrameHeader) + padded(frame_.header.length)) return Status::ok();
    frame_.body = in_.front().subspan(sizeof(FrameHeader), frame_.header.length);
    has_frame_ = true;
  }
  out = &frame_;
  return Status::ok();
}

void Link::pop() {
  in_.consume(sizeof(FrameHeader) + padded(frame_.header.length));
  has_frame_ = false;
}

}  // namespace sirtaki
