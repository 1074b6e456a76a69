#include "transport/memory/ring_pipe.h"

#include <algorithm>
#include <cstring>

namespace sirtaki {
namespace {

constexpr uint64_t capacity = SharedRegion::ring_bytes;

}  // namespace

ptrdiff_t RingPipe::write(std::span<const uint8_t> bytes, bool) {
  const uint64_t written = out_.written.load(std::memory_order_relaxed);
  const uint64_t used = written - out_.consumed.load(std::memory_order_acquire);
  if (used > capacity) return -1;  // only if the counter is corrupted
  const uint64_t count = std::min<uint64_t>(bytes.size(), capacity - used);
  const uint64_t at = written % capacity;
  const uint64_t first = std::min(count, capacity - at);
  std::memcpy(out_data_ + at, bytes.data(), first);
  std::memcpy(out_data_, bytes.data() + first, count - first);
  if (count) out_.written.store(written + count, std::memory_order_seq_cst);
  return static_cast<ptrdiff_t>(count);
}

ptrdiff_t RingPipe::read(std::span<uint8_t> bytes) {
  const uint64_t consumed = in_.consumed.load(std::memory_order_relaxed);
  const uint64_t available = in_.written.load(std::memory_order_seq_cst) - consumed;
  if (available > capacity) return -1;
  const uint64_t count = std::min<uint64_t>(bytes.size(), available);
  const uint64_t at = consumed % capacity;
  const uint64_t first = std::min(count, capacity - at);
  std::memcpy(bytes.data(), in_data_ + at, first);
  std::memcpy(bytes.data() + first, in_data_, count - first);
  if (count) in_.consumed.store(consumed + count, std::memory_order_release);
  return static_cast<ptrdiff_t>(count);
}

bool RingPipe::readable() const {
  return in_.written.load(std::memory_order_seq_cst) != in_.consumed.load(std::memory_order_relaxed);
}

}  // namespace sirtaki
