#include "observe/records/json.h"

#include <cmath>

#include "base/status.h"
#include "base/text.h"

namespace sirtaki {

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
