#include "base/text.h"

#include <algorithm>
#include <cstdint>

namespace sirtaki {
namespace {

size_t length_of(uint8_t first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return 2;
  if (first >= 0xe0 && first < 0xf0) return 3;
  return first >= 0xf0 && first < 0xf5 ? 4 : 0;
}

uint32_t character(std::string_view sequence) {
  if (sequence.size() == 1) return static_cast<uint8_t>(sequence[0]);
  uint32_t code = static_cast<uint8_t>(sequence[0]) & (0x7fu >> sequence.size());
  for (const char next : sequence.substr(1)) code = code << 6 | (static_cast<uint8_t>(next) & 0x3f);
  return code;
}

// Returns whether a character may mislead the reader: a control character, including those of ISO 6429 beyond ASCII
// (a terminal may interpret U+009B like ESC [), a line end, or a character that reorders a line (Unicode's
// bidirectional marks, https://www.unicode.org/reports/tr9).
bool misleads(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x061c || (code >= 0x200e && code <= 0x200f) ||
         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069) || code == 0xfeff;
}

// Returns the length of the character at `at` if it may be shown unchanged, else 0.
size_t printable_length(std::string_view text, size_t at) {
  const size_t length = utf8_length(text, at);
  return length && !misleads(character(text.substr(at, length))) ? length : 0;
}

}  // namespace

size_t utf8_length(std::string_view text, size_t at) {
  const auto byte = [&](size_t index) { return static_cast<uint8_t>(text[index]); };
  const uint8_t first = byte(at);
  const size_t length = length_of(first);
  if (length <= 1 || at + length > text.size()) return length == 1 ? 1 : 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  // The second byte has its own bounds, which exclude overlong forms, surrogates, and code points beyond the last one.
  const uint8_t second = byte(at + 1);
  const bool is_wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
                        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90);
  return is_wrong ? 0 : length;
}

size_t find_unprintable(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = printable_length(text, at);
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

std::string printable(std::string_view text, size_t limit) {
  std::string clean;
  clean.reserve(std::min(text.size(), limit));
  for (size_t at = 0; at < text.size();) {
    const size_t length = text[at] == '\n' ? 1 : printable_length(text, at);
    const size_t taken = std::max<size_t>(length, 1);
    if (clean.size() + taken > limit) break;
    if (length) clean += text.substr(at, length);
    else clean += '?';
    at += length ? length : std::max<size_t>(utf8_length(text, at), 1);
  }
  return clean;
}

}  // namespace sirtaki
