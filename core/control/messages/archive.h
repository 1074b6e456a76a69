// Archives, which visit the fields of a message. A message lists its fields once for all archives, in a function
// fields(archive, message). An Encoder appends the fields to bytes. A Decoder reads them into the message, reusing
// its memory; it checks every bound, and all reads after the first malformed value fail. An Eraser resets the fields,
// but keeps the memory of lists.
#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/codec.h"
#include "base/text.h"
#include "plan/request.h"

namespace sirtaki {

// A message of type M: const where it is encoded.
template <typename T, typename M>
concept MessageOf = std::same_as<std::remove_const_t<T>, M>;

constexpr uint8_t flag_bit = 0x80;  // of a byte that also holds an enumeration

class Encoder {
 public:
  explicit Encoder(Bytes& out) : writer_(out) {}

  template <typename T>
  void number(T value) {
    if constexpr (std::same_as<T, bool>) writer_.put<uint8_t>(value);
    else writer_.put(value);
  }
  template <typename E>
  void enumeration(E value, E) {
    writer_.put(value);
  }
  // An enumeration of few values, and a flag in the same byte.
  template <typename E>
  void enumeration(E value, E, bool flag) {
    writer_.put<uint8_t>(static_cast<uint8_t>(value) | (flag ? flag_bit : 0));
  }
  void flags(bool first, bool second) { writer_.put<uint8_t>((first ? 1 : 0) | (second ? 2 : 0)); }
  void name(const std::string& text) { writer_.put_text(text); }
  void printable_text(const std::string& text, size_t) { writer_.put_text(text); }
  template <typename T>
  void list(const std::vector<T>& values) {
    writer_.put_all(std::span<const T>(values));
  }
  template <typename T, typename Visit>
  void each(const std::vector<T>& values, Visit visit) {
    writer_.put(static_cast<uint32_t>(values.size()));
    for (const T& value : values) visit(value);
  }
  template <typename T, typename Visit>
  void optional(const std::optional<T>& value, bool is_there, Visit visit) {
    if (is_there) visit(*value);
  }
  template <typename T, typename Visit>
  void shared(const std::shared_ptr<const T>& value, Visit visit) {
    visit(*value);
  }
  void check(bool) {}
  void validate(auto) {}
  Writer& bytes() { return writer_; }

 private:
  Writer writer_;
};

class Decoder {
 public:
  explicit Decoder(std::span<const uint8_t> bytes) : reader_(bytes) {}

  bool is_done() const { return reader_.ok() && reader_.at_end(); }  // everything was read, and nothing was malformed

  template <typename T>
  void number(T& value) {
    if constexpr (std::same_as<T, bool>) value = reader_.get<uint8_t>() != 0;
    else value = reader_.get<T>();
  }
  template <typename E>
  void enumeration(E& value, E last) {
    value = reader_.get_enum(last);
  }
  template <typename E>
  void enumeration(E& value, E last, bool& flag) {
    const auto byte = reader_.get<uint8_t>();
    flag = byte & flag_bit;
    const auto code = static_cast<uint8_t>(byte & ~flag_bit);
    check(code <= static_cast<uint8_t>(last));
    value = code <= static_cast<uint8_t>(last) ? static_cast<E>(code) : E{};
  }
  void flags(bool& first, bool& second) {
    const auto bits = reader_.get<uint8_t>();
    first = bits & 1;
    second = bits & 2;
  }
  // Reads a tensor's name, or an empty one.
  void name(std::string& text) {
    text = reader_.get_text(longest_name);
    check(find_unprintable(text) == std::string::npos);
  }
  // Reads text that is shown to the user.
  void printable_text(std::string& text, size_t limit) { text = printable(reader_.get_text(limit), limit); }
  template <typename T>
  void list(std::vector<T>& values) {
    reader_.get_all_into(values);
  }
  template <typename T, typename Visit>
  void each(std::vector<T>& values, Visit visit) {
    const uint32_t count = reader_.get_count(smallest_item);
    values.clear();
    for (uint32_t i = 0; i < count && reader_.ok(); ++i) visit(values.emplace_back());
  }
  template <typename T, typename Visit>
  void optional(std::optional<T>& value, bool is_there, Visit visit) {
    value.reset();
    if (is_there) visit(value.emplace());
  }
  template <typename T, typename Visit>
  void shared(std::shared_ptr<const T>& value, Visit visit) {
    auto made = std::make_shared<T>();
    visit(*made);
    value = std::move(made);
  }
  void check(bool is_sane) {
    if (!is_sane) reader_.fail();
  }
  // Checks a condition that can only be computed from values that were read in full.
  void validate(auto is_sane) {
    if (reader_.ok() && !is_sane()) reader_.fail();
  }
  Reader& bytes() { return reader_; }

 private:
  static constexpr size_t smallest_item = 4;  // bytes of any element: bounds the allocation for a wrong count

  Reader reader_;
};

class Eraser {
 public:
  template <typename T>
  void number(T& value) {
    value = {};
  }
  template <typename E>
  void enumeration(E& value, E) {
    value = {};
  }
  template <typename E>
  void enumeration(E& value, E, bool& flag) {
    value = {};
    flag = false;
  }
  void flags(bool& first, bool& second) { first = second = false; }
  void name(std::string& text) { text.clear(); }
  void printable_text(std::string& text, size_t) { text.clear(); }
  template <typename T>
  void list(std::vector<T>& values) {
    values.clear();
  }
  template <typename T, typename Visit>
  void each(std::vector<T>& values, Visit) {
    values.clear();
  }
  template <typename T, typename Visit>
  void optional(std::optional<T>& value, bool, Visit) {
    value.reset();
  }
  void shared(auto& value, auto) { value.reset(); }
  void check(bool) {}
};

}  // namespace sirtaki
