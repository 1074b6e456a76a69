// Conversion of 16-bit floats to and from 32 bits, rounding to nearest even. Included by each kernel file, hence the
// anonymous namespace: one copy per file, each compiled for its own instruction set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
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

[[maybe_unused]] inline BFloat16 narrow_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto rounded = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {is_nan ? static_cast<uint16_t>(bits >> 16 | 0x40) : rounded};
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

}  // namespace
