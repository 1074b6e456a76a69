// The fuzz targets: each takes arbitrary bytes, and reports with CHECK (tests/core/check.h) when something that must
// hold does not. `make fuzz` runs each with libFuzzer and sanitizers; test_control runs each on its seeds and findings.
#pragma once

#include <span>
#include <vector>

#include "base/codec.h"
#include "check.h"

namespace sirtaki::fuzz {

using Input = std::span<const uint8_t>;

struct Target {
  const char* name;
  void (*run)(Input);
  std::vector<Bytes> (*seeds)();  // valid inputs to start from
};

extern const Target report, decision, aggregate, negotiator, relay, coordinator, link, request;
inline const Target* const targets[] = {&report, &decision,    &aggregate, &negotiator,
                                        &relay,  &coordinator, &link,      &request};

// A reader that takes an input apart. At its end everything is zero, or empty.
class Slices {
 public:
  explicit Slices(Input input) : rest_(input) {}

  bool at_end() const { return rest_.empty(); }

  uint8_t byte() { return rest_.empty() ? 0 : take(1)[0]; }

  template <typename T>
  T value() {
    T number{};
    const Input bytes = take(sizeof number);
    if (!bytes.empty()) std::memcpy(&number, bytes.data(), bytes.size());
    return number;
  }

  // Returns as many bytes as the two-byte length before them says.
  Input message() { return take(value<uint16_t>()); }

 private:
  Input take(size_t count) {
    const Input taken = rest_.first(std::min(count, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

  Input rest_;
};

// Appends a message for Slices::message(), for seeds.
inline void put_message(Bytes& seed, const Bytes& message) {
  Writer(seed).put(static_cast<uint16_t>(message.size()));
  seed.insert(seed.end(), message.begin(), message.end());
}

}  // namespace sirtaki::fuzz
