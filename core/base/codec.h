// Serialization: little-endian values are appended to a buffer, and read back with every bound checked.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace sirtaki {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

using Bytes = std::vector<uint8_t>;

class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out) {}

  template <typename T>
  void put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    const size_t at = out_.size();
    out_.resize(at + sizeof(T));
    std::memcpy(out_.data() + at, &value, sizeof(T));
  }

  template <typename T>
  void put_all(std::span<const T> values) {
    static_assert(std::is_arithmetic_v<T>);
    put(static_cast<uint32_t>(values.size()));
    const size_t at = out_.size();
    out_.resize(at + values.size_bytes());
    if (!values.empty()) std::memcpy(out_.data() + at, values.data(), values.size_bytes());
  }

  void put_text(std::string_view text) { put_all(std::span<const char>(text.data(), text.size())); }

 private:
  Bytes& out_;
};

// A reader: after the first read past the end, or past a limit, ok() stays false and all values read as zero.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  bool at_end() const { return bytes_.empty(); }
  void fail() {
    ok_ = false;
    bytes_ = {};
  }

  template <typename T>
  T get() {
    static_assert(std::is_arithmetic_v<T>);
    T value{};
    if (bytes_.size() < sizeof(T)) {
      fail();
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }

  // Reads an enumerator up to `last`, so that a peer's byte never becomes an unknown enumerator.
  template <typename E>
  E get_enum(E last) {
    const auto value = get<std::underlying_type_t<E>>();
    if (value > static_cast<std::underlying_type_t<E>>(last)) {
      fail();
      return E{};
    }
    return static_cast<E>(value);
  }

  // Reads a count of items that take at least `minimum_bytes` each, so that a wrong count cannot cause a large
  // allocation.
  uint32_t get_count(size_t minimum_bytes) {
    const auto count = get<uint32_t>();
    if (count > bytes_.size() / minimum_bytes) {
      fail();
      return 0;
    }
    return count;
  }

  // Reads a list into an existing vector, whose memory is reused.
  template <typename T>
  void get_all_into(std::vector<T>& values) {
    const uint32_t count = get_count(sizeof(T));
    values.resize(count);
    if (count) std::memcpy(values.data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
  }

  std::string get_text(size_t limit) {
    const uint32_t count = get_count(1);
    if (count > limit) {
      fail();
      return {};
    }
    std::string text(reinterpret_cast<const char*>(bytes_.data()), count);
    bytes_ = bytes_.subspan(count);
    return text;
  }

 private:
  std::span<const uint8_t> bytes_;
  bool ok_ = true;
};

}  // namespace sirtaki
