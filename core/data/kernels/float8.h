// Conversion of 8-bit floats to and from 32 bits, rounding to nearest even: the formats of Micikevicius et al., "FP8
// Formats for Deep Learning" (2022), and their variants without infinity and negative zero ("fnuz"). It uses a table,
// since there are only 256 values. Included by each kernel file, hence the anonymous namespace.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace {

enum class Float8Ends { infinity, nan_only, fnuz };  // the meaning of the largest codes

template <int mantissa_bits, int bias, Float8Ends ends>
struct Float8 {
  uint8_t bits;

  // The codes of the positive finite values, ascending: 0 to last_finite.
  static constexpr int last_finite = ends == Float8Ends::infinity ? 0x7b : ends == Float8Ends::nan_only ? 0x7e : 0x7f;
  static constexpr uint8_t nan = ends == Float8Ends::fnuz ? 0x80 : 0x7f;
  // The code for a value that is too large.
  static constexpr uint8_t beyond = ends == Float8Ends::infinity ? 0x7c : nan;
  static constexpr bool has_negative_zero = ends != Float8Ends::fnuz;

  static constexpr float magnitude(int code) {
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    float value = static_cast<float>(exponent ? mantissa + (1 << mantissa_bits) : mantissa);
    for (int power = std::max(exponent, 1) - bias - mantissa_bits; power != 0; power += power < 0 ? 1 : -1)
      value *= power < 0 ? 0.5F : 2.0F;
    return value;
  }

  static constexpr std::array<float, 256> values() {
    std::array<float, 256> all{};
    for (int code = 0; code < 256; ++code) {
      const int positive = code & 0x7f;
      float value = std::numeric_limits<float>::quiet_NaN();
      if (positive <= last_finite) value = magnitude(positive);
      else if (ends == Float8Ends::infinity && positive == beyond) value = std::numeric_limits<float>::infinity();
      if (ends == Float8Ends::fnuz && code == nan) value = std::numeric_limits<float>::quiet_NaN();
      all[static_cast<size_t>(code)] = code & 0x80 ? -value : value;
    }
    return all;
  }
  static constexpr std::array<float, 256> table = values();
};

using Float8E4M3fn = Float8<3, 7, Float8Ends::nan_only>;
using Float8E4M3fnuz = Float8<3, 8, Float8Ends::fnuz>;
using Float8E5M2 = Float8<2, 15, Float8Ends::infinity>;
using Float8E5M2fnuz = Float8<2, 16, Float8Ends::fnuz>;

template <int mantissa_bits, int bias, Float8Ends ends>
void widen_block(float* out, const Float8<mantissa_bits, bias, ends>* in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = in[i].table[in[i].bits];
}

template <typename Format>
inline uint8_t narrow_float8(float value) {
  if (value != value) return Format::nan;
  const float size = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7fffffff);
  const float* first = Format::table.data();
  const auto above = static_cast<int>(std::upper_bound(first, first + Format::last_finite + 1, size) - first);
  const int below = above - 1;
  // For rounding, the grid continues beyond the last value.
  const float lower = first[below];
  const float upper = above <= Format::last_finite ? first[above] : lower + (lower - first[below - 1]);
  const float middle = lower + (upper - lower) / 2;
  int code = size > middle || (size == middle && (below & 1)) ? above : below;
  if (code > Format::last_finite) code = Format::beyond;
  if (code == Format::nan || (code == 0 && !Format::has_negative_zero)) return static_cast<uint8_t>(code);
  return static_cast<uint8_t>(code | (std::bit_cast<uint32_t>(value) >> 31) << 7);
}

template <int mantissa_bits, int bias, Float8Ends ends>
void narrow_block(Float8<mantissa_bits, bias, ends>* out, const float* in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i].bits = narrow_float8<Float8<mantissa_bits, bias, ends>>(in[i]);
}

}  // namespace
