// A frame is one message on a link: a fixed header, then `length` bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sirtaki {

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

}  // namespace sirtaki
