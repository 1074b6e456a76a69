// The arithmetic of wire formats (base/dtypes/wire_format.h). Included by each kernel file, hence the anonymous
// namespace: one copy per file, compiled for its own instruction set. All loops vectorise, and give the same bits with
// each of them.
//
// A block's scale is its largest magnitude, which the largest code stands for exactly: the product of that code and its
// inverse is 1 in floats, too. Therefore a value that was decoded encodes to the same scale and code again, in spite of
// the rounding of factors, which is far smaller than a code's step. Scales are so large that no value is subnormal.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/dtypes/wire_format.h"
#include "data/kernels/kernels.h"

namespace {

using namespace sirtaki;

constexpr float smallest_scale = 0x1p-100f;  // a block with a smaller one is encoded as zeros

// Integers in two's complement.
struct Int8Code {
  static constexpr float largest = 127;

  static uint8_t narrow(float value) {
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(value + 0x1.8p23f));  // the sum's last bit is worth 1
  }
  static float widen(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

// Floats of 4 exponent and 3 mantissa bits, as float8_e4m3fn: multiples of 2^-3 of their power of two, which is at
// least 2^-6. The code of a value is that multiple, plus 8 for each power of two above the least one. No step depends
// on a condition, which would keep compilers from making vectors.
struct Fp8Code {
  static constexpr float largest = 448;
  static constexpr uint32_t least_power = (127 - 6) << 23;  // the bits of 2^-6

  static uint8_t narrow(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t power = std::max(magnitude & 0x7f800000, least_power);
    const uint32_t large = power + (20 << 23);  // the last bit of a float of this size is worth 2^-3 of the power
    const auto sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(large);
    const uint32_t multiple = std::bit_cast<uint32_t>(sum) - large;
    return static_cast<uint8_t>((bits >> 24 & 0x80) | (((power - least_power) >> 20) + multiple));
  }
  static float widen(uint8_t code) {
    const uint32_t exponent = code >> 3 & 15;
    const uint32_t multiple = (code & 7) + (std::min(exponent, uint32_t{1}) << 3);
    const uint32_t step = least_power - (3 << 23) + ((std::max(exponent, uint32_t{1}) - 1) << 23);
    const float size = static_cast<float>(static_cast<int32_t>(multiple)) * std::bit_cast<float>(step);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(size) | static_cast<uint32_t>(code & 0x80) << 24);
  }
};

// Returns the scale of a block: a NaN if one of its values is no finite number, 0 if all of them become 0.
inline float scale_of_block(const float* in, size_t count) {
  uint32_t largest = 0;  // the bits of magnitudes are ordered as they are
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(in[i]) & 0x7fffffff);
  if (largest >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  const auto scale = std::bit_cast<float>(largest);
  return scale < smallest_scale ? 0 : scale;
}

inline float read_scale(const uint8_t* in) {
  float scale;
  std::memcpy(&scale, in, sizeof scale);
  return scale;
}

template <typename Code>
inline float value_of(uint8_t code, float scale) {
  constexpr float inverse = 1 / Code::largest;
  static_assert(Code::largest * inverse == 1);
  return Code::widen(code) * inverse * scale;
}

template <typename Code>
inline void encode_block(uint8_t* __restrict out, const float* __restrict in, size_t count) {
  const float scale = scale_of_block(in, count);
  std::memcpy(out, &scale, sizeof scale);
  out += sizeof scale;
  if (scale > 0) {
    const float factor = Code::largest / scale;
    for (size_t i = 0; i < count; ++i) out[i] = Code::narrow(in[i] * factor);
  } else {
    std::memset(out, 0, count);
  }
}

template <typename Code>
inline void decode_block(float* __restrict out, const uint8_t* __restrict in, size_t count) {
  const float scale = read_scale(in);
  in += sizeof scale;
  if (scale == scale)
    for (size_t i = 0; i < count; ++i) out[i] = value_of<Code>(in[i], scale);
  else std::fill_n(out, count, std::numeric_limits<float>::quiet_NaN());  // the sign of a product would be anything
}

template <typename Code>
inline void add_block(float* __restrict out, const uint8_t* __restrict in, size_t count) {
  const float scale = read_scale(in);
  in += sizeof scale;
  for (size_t i = 0; i < count; ++i) out[i] += value_of<Code>(in[i], scale);
}

// Calls a function for each block of a tensor, which is encoded where it consists of bytes.
template <auto for_block, typename Out, typename In>
void for_blocks(Out* out, const In* in, size_t elements) {
  const auto size = [](const auto* block, size_t count) { return sizeof *block == 1 ? encoded_size(count) : count; };
  for (size_t count = 0; elements > 0; elements -= count) {
    count = std::min(wire_block, elements);
    for_block(out, in, count);
    out += size(out, count);
    in += size(in, count);
  }
}

template <typename Code>
constexpr WireKernels wire_kernels_for() {
  return {for_blocks<encode_block<Code>, uint8_t, float>, for_blocks<decode_block<Code>, float, uint8_t>,
          for_blocks<add_block<Code>, float, uint8_t>};
}

// The kernels by wire format.
constexpr WireKernels wire_table[] = {{}, wire_kernels_for<Int8Code>(), wire_kernels_for<Fp8Code>()};
static_assert(std::size(wire_table) == wire_format_count, "each wire format has its kernels");

const WireKernels* wire_kernels_of(WireFormat format) {
  const WireKernels& kernels = wire_table[static_cast<size_t>(format)];
  return kernels.encode ? &kernels : nullptr;
}

}  // namespace
