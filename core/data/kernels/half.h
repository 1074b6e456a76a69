// Conversion of 16-bit floats to and from 32 bits, rounding to nearest even. Included by each kernel file, hence the
// anonymous namespace: one copy per file, each compiled for its own instruction set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

[[maybe_unused]] inline float widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Rounds the bits of floats to those of bfloat16, in the upper halves; a NaN whose lower half is zero stays a NaN.
template <typename Bits>
inline Bits round_to_upper_half(Bits bits) {
  return bits + 0x7fff + (bits >> 16 & 1);
}

[[maybe_unused]] inline BFloat16 narrow_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>((is_nan ? bits | 0x400000 : round_to_upper_half(bits)) >> 16)};
}

[[maybe_unused]] inline float widen(Float16 value) {
  // After the shift, the exponent is too small by 112; a multiplication corrects it, for subnormals too.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const bool special = (value.bits & 0x7c00) == 0x7c00;  // infinity or NaN
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  return std::bit_cast<float>(sign | (special ? magnitude | 0x7f800000 : std::bit_cast<uint32_t>(scaled)));
}

[[maybe_unused]] inline Float16 narrow_float16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);  // NaN stays NaN
  } else if (magnitude >= 0x47800000) {
    half = 0x7c00;  // 65,536 and more
  } else if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 aligns the bits with the end of the significand, and rounds them.
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

[[maybe_unused]] inline void widen_block(float* out, const BFloat16* in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = widen(in[i]);
}
[[maybe_unused]] inline void narrow_block(BFloat16* out, const float* in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = narrow_bfloat16(in[i]);
}

[[maybe_unused]] inline void widen_block(float* out, const Float16* in, size_t count) {
  size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
  for (; i < count; ++i) out[i] = widen(in[i]);
}
[[maybe_unused]] inline void narrow_block(Float16* out, const float* in, size_t count) {
  size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; ++i) out[i] = narrow_float16(in[i]);
}

#ifdef __AVX2__
constexpr size_t register_bytes = 32;
#else
constexpr size_t register_bytes = 16;
#endif
using Floats = float __attribute__((vector_size(register_bytes)));
using Words = uint32_t __attribute__((vector_size(register_bytes)));

// A register of 16-bit floats, widened to two of 32 bits, in the order of elements that suits the format.
struct Widened {
  Floats first, second;
};

// The elements of even and of odd index, as neither has to change its lane.
[[maybe_unused]] inline Widened widen_register(const BFloat16* in) {
  Words pairs;
  std::memcpy(&pairs, in, sizeof pairs);
  return {std::bit_cast<Floats>(pairs << 16), std::bit_cast<Floats>(pairs & 0xffff0000)};
}
// For results of arithmetic on bfloat16, in which the lower half of a NaN is zero.
[[maybe_unused]] inline void narrow_register(BFloat16* out, Widened in) {
  const Words even = round_to_upper_half(std::bit_cast<Words>(in.first));
  const Words odd = round_to_upper_half(std::bit_cast<Words>(in.second));
  const Words pairs = even >> 16 | (odd & 0xffff0000);
  std::memcpy(out, &pairs, sizeof pairs);
}

#if defined(__AVX2__) && defined(__F16C__)
[[maybe_unused]] inline Widened widen_register(const Float16* in) {
  const auto* halves = reinterpret_cast<const __m128i*>(in);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
[[maybe_unused]] inline void narrow_register(Float16* out, Widened in) {
  auto* halves = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(in.first, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(in.second, _MM_FROUND_TO_NEAREST_INT));
}
#endif

}  // namespace
