// A frame is one message on a link: a fixed header, then `length` bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sirtaki {

// aggregate: a leader's report for all ranks below it. cut_off: a rank above has left: no more Decisions come.
enum class FrameKind : uint16_t { report = 1, aggregate, decision, abort, goodbye, cut_off, data };

struct FrameHeader {
  uint32_t length = 0;
  FrameKind kind = FrameKind::data;
  uint16_t step = 0;   // data: index of the plan's transfer (wraps), so that a desync is detected
  uint64_t plan = 0;   // data: the plan's number
};
static_assert(sizeof(FrameHeader) == 16);

// The longest body that is accepted. A report of 8,192 new tensors stays far below it.
constexpr uint32_t longest_frame = 64u << 20;

// Returns the padded length of a body on the wire, so that every body begins at an address fit for any element.
constexpr size_t padded(size_t length) { return (length + 15) / 16 * 16; }

struct Frame {
  FrameHeader header;
  std::span<const uint8_t> body;
};

}  // namespace sirtaki
