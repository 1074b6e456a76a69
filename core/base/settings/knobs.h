// The settings of a context: one checked value for each row of knob_table.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/settings/knob_table.h"
#include "base/status.h"
#include "sirtaki.h"

namespace sirtaki {

#define SIRTAKI_NAME(name, ...) name,
enum class Knob { SIRTAKI_KNOBS(SIRTAKI_NAME) count_ };
#undef SIRTAKI_NAME
constexpr int knob_count = static_cast<int>(Knob::count_);

const srt_knob* knob_entry(int index);  // nullptr out of range
// Returns whether a setting may have this value: a number, nanoseconds of a time, or the position of a choice.
bool may_have(Knob knob, int64_t value);

// One value per knob, checked when it is set.
class Config {
 public:
  Config();  // sets the defaults

  Status set(std::string_view name, std::string_view value);
  const std::string* find(std::string_view name) const;  // nullptr: no such knob

  int64_t integer(std::string_view name) const;              // -1: no such knob

  int64_t integer(Knob knob) const { return values_[static_cast<size_t>(knob)].integer; }
  Nanoseconds time(Knob knob) const { return values_[static_cast<size_t>(knob)].integer; }
  const std::string& text(Knob knob) const { return values_[static_cast<size_t>(knob)].text; }

 private:
  struct Value {
    std::string text;
    int64_t integer = 0;  // numbers; nanoseconds of times; positions of choices
  };
  std::array<Value, knob_count> values_;
};

}  // namespace sirtaki
