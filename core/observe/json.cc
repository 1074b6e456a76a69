#include "observe/json.h"

#include <cmath>

#include "base/status.h"

namespace sirtaki {
namespace {

// The length of the UTF-8 sequence at `at`; 0 if it is none.
size_t utf8_length(std::string_view text, size_t at) {
  const auto byte = static_cast<uint8_t>(text[at]);
  const size_t length = byte < 0x80                   ? 1
                        : byte >= 0xc2 && byte < 0xe0 ? 2
                        : byte >= 0xe0 && byte < 0xf0 ? 3
                        : byte >= 0xf0 && byte < 0xf5 ? 4
                                                      : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((static_cast<uint8_t>(text[at + i]) & 0xc0) != 0x80) return 0;
  // The second byte has bounds of its own: no overlong forms, surrogates, or what lies beyond the last character.
  const auto second = length > 1 ? static_cast<uint8_t>(text[at + 1]) : 0;
  const bool is_wrong = (byte == 0xe0 && second < 0xa0) || (byte == 0xed && second >= 0xa0) ||
                        (byte == 0xf0 && second < 0x90) || (byte == 0xf4 && second >= 0x90);
  return is_wrong ? 0 : length;
}

}  // namespace

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  put_quoted(name);
  text_ += ": ";
  needs_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  separate();
  put_quoted(text);
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  separate();
  text_ += std::isfinite(number) ? format("%.9g", number) : "null";
  return *this;
}

JsonWriter& JsonWriter::value(bool truth) {
  separate();
  text_ += truth ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::new_line() {
  if (needs_comma_) text_ += ',';
  needs_comma_ = false;
  text_ += '\n';
  return *this;
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  text_ += bracket;
  needs_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  text_ += bracket;
  needs_comma_ = true;
  return *this;
}

void JsonWriter::separate() {
  if (needs_comma_) text_ += ", ";
  needs_comma_ = true;
}

void JsonWriter::put_quoted(std::string_view text) {
  text_ += '"';
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text, at);
    const char first = text[at];
    if (length == 0) text_ += '?';
    else if (first == '"' || first == '\\') (text_ += '\\') += first;
    else if (length == 1 && static_cast<uint8_t>(first) < 0x20) text_ += format("\\u%04x", first);
    else text_ += text.substr(at, length);
    at += length ? length : 1;
  }
  text_ += '"';
}

}  // namespace sirtaki
