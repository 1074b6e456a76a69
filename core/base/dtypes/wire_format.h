// Wire formats: how an all-reduce sends its elements between ranks that share no memory. An encoded tensor is a
// sequence of blocks: a scale (a float), which is the block's largest magnitude, and one code of a byte per element.
// Only a tensor's last block may be short, and blocks begin with the tensor, so what a tensor becomes does not depend
// on the tensors that it is fused with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "sirtaki.h"

namespace sirtaki {

enum class WireFormat : uint8_t { exact = SRT_WIRE_EXACT, int8 = SRT_WIRE_INT8, fp8 = SRT_WIRE_FP8 };

constexpr size_t wire_block = 256;  // elements with a common scale

// All wire formats, in the order of their codes. Their arithmetic is in data/kernels/wire.h.
constexpr srt_wire_format wire_format_table[] = {
    {SRT_WIRE_EXACT, "exact", 0},
    {SRT_WIRE_INT8, "int8", wire_block},
    {SRT_WIRE_FP8, "fp8", wire_block},
};
constexpr int wire_format_count = std::size(wire_format_table);
constexpr auto last_wire_format = static_cast<WireFormat>(wire_format_count - 1);

constexpr bool wire_formats_are_in_order() {
  for (int i = 0; i < wire_format_count; ++i)
    if (wire_format_table[i].code != i) return false;
  return true;
}
static_assert(wire_formats_are_in_order(), "a row's position is its code");

// Returns the wire format with this code, nullptr if there is none.
constexpr const srt_wire_format* wire_format_entry(int code) {
  return code >= 0 && code < wire_format_count ? &wire_format_table[code] : nullptr;
}
constexpr const char* wire_format_name(WireFormat format) { return wire_format_table[static_cast<int>(format)].name; }

// Returns the encoded size, in bytes, of a tensor or of a part of it that begins with a block.
constexpr size_t encoded_size(size_t elements) {
  return (elements + wire_block - 1) / wire_block * sizeof(float) + elements;
}

}  // namespace sirtaki
