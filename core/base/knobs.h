// All settings, declared once: name, type, default, choices, help. The launcher's flags, the environment variables and
// the documentation are derived from this table.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"
#include "sirtaki.h"

namespace sirtaki {

enum class Knob {
  // clang-format off
  fusion_threshold, cache_capacity, report_bytes, report_window, plans_in_flight, control_fan_out,
  join_average, transport, cpu_algorithm, gpu_backend, gpu_libraries, sockets_per_link, encrypt, chunk_bytes, kernel, spin,
  stall_report, stall_deadline, progress_deadline, heartbeat, log_descriptor,
  recorder_operations, stall_report_file, check_parameters, dump_directory,
  count_
  // clang-format on
};
constexpr int knob_count = static_cast<int>(Knob::count_);

const srt_knob* knob_entry(int index);  // nullptr out of range

// One value per knob, checked when it is set.
class Config {
 public:
  Config();  // sets the defaults

  Status set(std::string_view name, std::string_view value);
  const std::string* find(std::string_view name) const;  // nullptr: no such knob

  int64_t integer(Knob knob) const { return values_[static_cast<size_t>(knob)].integer; }
  Nanoseconds time(Knob knob) const { return values_[static_cast<size_t>(knob)].integer; }
  const std::string& text(Knob knob) const { return values_[static_cast<size_t>(knob)].text; }

 private:
  struct Value {
    std::string text;
    int64_t integer = 0;  // numbers; nanoseconds for times
  };
  std::array<Value, knob_count> values_;
};

}  // namespace sirtaki
