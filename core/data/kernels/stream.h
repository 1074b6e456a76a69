// Copies whose destination another core reads next. Plain stores leave modified lines in this core's cache, from
// which the reader fetches them one by one; non-temporal stores bypass the cache, so that the reader's prefetcher
// works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

// ThreadSanitizer does not see non-temporal stores, so its builds use memcpy.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
constexpr size_t line = 64;

inline void stream_line(uint8_t* to, const uint8_t* from) {
#ifdef __AVX2__
  for (int part = 0; part < 2; ++part)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + part,
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + part));
#else
  for (int part = 0; part < 4; ++part)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + part,
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + part));
#endif
}

[[maybe_unused]] void stream(void* destination, const void* source, size_t bytes) {
  auto* to = static_cast<uint8_t*>(destination);
  const auto* from = static_cast<const uint8_t*>(source);
  const size_t head = (line - reinterpret_cast<uintptr_t>(to) % line) % line;
  if (bytes < head + line) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + line <= bytes; at += line) stream_line(to + at, from + at);
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // before a reader is notified of the bytes
}
#else
[[maybe_unused]] void stream(void* destination, const void* source, size_t bytes) {
  std::memcpy(destination, source, bytes);
}
#endif

}  // namespace
