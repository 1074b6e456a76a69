// Wire formats, defined once more in plain loops: the codes of fp8 are found by a search among all its values.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/dtypes/wire_format.h"

namespace reference {

using sirtaki::wire_block;
using sirtaki::WireFormat;

constexpr WireFormat formats[] = {WireFormat::int8, WireFormat::fp8};

inline double value_of(WireFormat format, int code) {
  if (format == WireFormat::int8) return code < 128 ? code : code - 256;
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 0x80 ? -size : size;
}

inline uint8_t code_of(WireFormat format, float value) {
  if (format == WireFormat::int8) return static_cast<uint8_t>(static_cast<int>(std::nearbyint(value)));
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double distance = std::fabs(value_of(format, code) - std::fabs(value));
    const double least = std::fabs(value_of(format, best) - std::fabs(value));
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

inline float largest_code(WireFormat format) { return format == WireFormat::int8 ? 127 : 448; }

// Returns the scale of the `count` values of a block.
inline float scale_of(const float* values, size_t count) {
  float largest = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::fabs(values[i]));
  }
  return largest < 0x1p-100f ? 0 : largest;
}

inline std::vector<uint8_t> encode(WireFormat format, const std::vector<float>& values) {
  std::vector<uint8_t> bytes;
  for (size_t at = 0; at < values.size(); at += wire_block) {
    const size_t count = std::min(wire_block, values.size() - at);
    const float scale = scale_of(values.data() + at, count);
    uint8_t raw[sizeof scale];
    std::memcpy(raw, &scale, sizeof scale);
    bytes.insert(bytes.end(), raw, raw + sizeof scale);
    for (size_t i = at; i < at + count; ++i)
      bytes.push_back(scale > 0 ? code_of(format, values[i] * (largest_code(format) / scale)) : 0);
  }
  return bytes;
}

inline std::vector<float> decode(WireFormat format, const std::vector<uint8_t>& bytes, size_t count) {
  std::vector<float> values;
  const uint8_t* in = bytes.data();
  while (values.size() < count) {
    float scale;
    std::memcpy(&scale, in, sizeof scale);
    in += sizeof scale;
    for (const size_t end = std::min(count, values.size() + wire_block); values.size() < end; ++in)
      values.push_back(std::isnan(scale)
                           ? std::numeric_limits<float>::quiet_NaN()
                           : static_cast<float>(value_of(format, *in)) * (1 / largest_code(format)) * scale);
  }
  return values;
}

// Returns what a wire format makes of a tensor.
inline std::vector<float> round(WireFormat format, const std::vector<float>& values) {
  return decode(format, encode(format, values), values.size());
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  const auto same = [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

}  // namespace reference
