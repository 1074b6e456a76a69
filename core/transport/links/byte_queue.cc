#include "transport/links/byte_queue.h"

#include <algorithm>
#include <cstring>

namespace sirtaki {

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

std::span<uint8_t> SendQueue::extend(size_t count) {
  if (spans_.empty() || spans_.back().elsewhere) spans_.push_back({nullptr, 0});
  spans_.back().bytes += count;
  size_ += count;
  return own_.extend(count);
}

void SendQueue::refer(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  spans_.push_back({bytes.data(), bytes.size()});
  size_ += bytes.size();
}

std::span<const uint8_t> SendQueue::front() const {
  if (spans_.empty()) return {};
  const Span& part = spans_.front();
  return part.elsewhere ? std::span(part.elsewhere, part.bytes) : own_.front().first(part.bytes);
}

void SendQueue::consume(size_t count) {
  size_ -= count;
  while (count) {
    Span& part = spans_.front();
    const size_t here = std::min(count, part.bytes);
    if (part.elsewhere) part.elsewhere += here;
    else own_.consume(here);
    part.bytes -= here;
    count -= here;
    if (part.bytes == 0) spans_.pop_front();
  }
}

void SendQueue::clear() {
  own_.consume(own_.size());
  spans_.clear();
  size_ = 0;
}

void SendQueue::keep() {
  SendQueue kept;
  while (size_) {
    const std::span<const uint8_t> part = front();
    std::memcpy(kept.extend(part.size()).data(), part.data(), part.size());
    consume(part.size());
  }
  *this = std::move(kept);
}

}  // namespace sirtaki
