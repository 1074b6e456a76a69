#include "transport/links/link.h"

#include <algorithm>
#include <cstring>

namespace sirtaki {
namespace {

// Bytes to read beyond a header. A longer body is then read to its end but no further, so that little of a body that
// is read directly to its place has to be copied.
constexpr size_t read_ahead = 16 << 10;

}  // namespace

std::span<uint8_t> Link::compose(FrameHeader header) {
  begin(header);
  return add(header.length);
}

void Link::send(FrameHeader header, std::span<const uint8_t> body) {
  header.length = static_cast<uint32_t>(body.size());
  const std::span<uint8_t> space = compose(header);
  if (!body.empty()) std::memcpy(space.data(), body.data(), body.size());
}

void Link::begin(FrameHeader header) {
  std::memcpy(out_.extend(sizeof header).data(), &header, sizeof header);
  ++frames_queued_;
  missing_ = header.length;
  padding_ = padded(header.length) - header.length;
}

std::span<uint8_t> Link::add(size_t bytes) {
  missing_ -= bytes;
  const size_t padding = missing_ ? 0 : padding_;
  const std::span<uint8_t> space = out_.extend(bytes + padding);
  std::fill_n(space.data() + bytes, padding, uint8_t{0});
  return space.first(bytes);
}

void Link::add_elsewhere(std::span<const uint8_t> bytes) {
  out_.refer(bytes);
  missing_ -= bytes.size();
  if (!missing_ && padding_) std::ranges::fill(out_.extend(padding_), uint8_t{0});
}

bool Link::flush() {
  bool moved = false;
  while (out_.size()) {
    const std::span<const uint8_t> part = out_.front();
    const ptrdiff_t written = unwritable_ ? -1 : pipe_->write(part, part.size() < out_.size());
    if (written < 0) {  // reading then shows the reason, and delivers the peer's last frames
      unwritable_ = true;
      out_.clear();
    }
    if (written <= 0) break;
    out_.consume(static_cast<size_t>(written));
    if (sent_) sent_->add(static_cast<size_t>(written));
    moved = true;
  }
  return moved;
}

bool Link::receive() {
  // Bytes stay in the pipe while a complete frame waits here, which throttles a peer that is ahead.
  const Frame* ready = nullptr;
  if (ended_ || !may_receive_ || !front(ready).is_ok() || ready) return false;
  if (is_placing_) return receive_placed();
  const size_t frame_bytes = in_.size() >= sizeof(FrameHeader) ? sizeof(FrameHeader) + padded(frame_.header.length) : 0;
  const size_t wanted = frame_bytes > in_.size() ? std::max(frame_bytes - in_.size(), read_ahead) : read_ahead;
  const std::span<uint8_t> room = in_.room(wanted).first(wanted);
  const ptrdiff_t count = pipe_->read(room);
  if (count < 0) ended_ = true;
  if (count <= 0) return false;
  in_.commit(static_cast<size_t>(count));
  return true;
}

bool Link::receive_placed() {
  const ptrdiff_t count = pipe_->read(place_.subspan(placed_));
  if (count < 0) ended_ = true;
  if (count <= 0) return false;
  placed_ += static_cast<size_t>(count);
  return true;
}

void Link::place(const FrameHeader& header, std::span<uint8_t> where) {
  if (has_frame_ || is_placing_ || padded(header.length) != header.length) return;
  placed_header_ = header;
  place_ = where;
}

// Starts to place a body of which the header has arrived, but not all bytes.
bool Link::begins_placed_frame() {
  if (place_.empty() || std::memcmp(&frame_.header, &placed_header_, sizeof(FrameHeader)) != 0) return false;
  const std::span<const uint8_t> here = in_.front().subspan(sizeof(FrameHeader));
  if (here.size() >= place_.size()) return false;
  std::copy(here.begin(), here.end(), place_.begin());
  placed_ = here.size();
  in_.consume(sizeof(FrameHeader) + placed_);
  return is_placing_ = true;
}

Status Link::front(const Frame*& out) {
  out = nullptr;
  if (!has_frame_ && !is_placing_) {
    if (in_.size() < sizeof(FrameHeader)) return Status::ok();
    std::memcpy(&frame_.header, in_.front().data(), sizeof(FrameHeader));
    const auto kind = static_cast<uint16_t>(frame_.header.kind);
    if (frame_.header.length > longest_frame || kind < static_cast<uint16_t>(FrameKind::report) ||
        kind > static_cast<uint16_t>(FrameKind::data))
      return {SRT_PROTOCOL, "a frame with an impossible header arrived"};
    if (!begins_placed_frame()) {
      if (in_.size() < sizeof(FrameHeader) + padded(frame_.header.length)) return Status::ok();
      frame_.body = in_.front().subspan(sizeof(FrameHeader), frame_.header.length);
      has_frame_ = true;
    }
  }
  if (is_placing_) {
    if (placed_ < place_.size()) return Status::ok();
    frame_.body = place_;
    has_frame_ = true;
  }
  out = &frame_;
  return Status::ok();
}

void Link::pop() {
  ++frames_taken_;
  if (!is_placing_) in_.consume(sizeof(FrameHeader) + padded(frame_.header.length));
  has_frame_ = is_placing_ = false;
  place_ = {};
}

void Link::drop_references() {
  out_.keep();
  if (is_placing_) ended_ = true;  // the rest of that body has no place to go
  is_placing_ = has_frame_ = false;
  place_ = {};
}

void Link::end_writing() {
  flush();
  if (!unsent()) pipe_->end_writing();
}

}  // namespace sirtaki
