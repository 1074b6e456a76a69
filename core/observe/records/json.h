// A writer of JSON text. The output is always valid: text that is not valid UTF-8 is repaired.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace sirtaki {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);
  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(double number);
  JsonWriter& value(bool truth);
  JsonWriter& value(std::integral auto number) {
    separate();
    text_ += std::to_string(number);
    return *this;
  }

  template <typename T>
  JsonWriter& member(std::string_view name, const T& content) {
    return key(name).value(content);
  }

  // Writes a line break, so that the file is easier to read.
  JsonWriter& new_line();

  const std::string& text() const { return text_; }
  std::string take() { return std::move(text_); }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void separate();
  void put_quoted(std::string_view text);

  std::string text_;
  bool needs_comma_ = false;
};

}  // namespace sirtaki
