// The settings that may change while the ranks run. Rank 0 wishes for new values; the coordinator's next Decision
// carries them, so that every rank changes them at the same place in the order of plans.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include "base/settings/knobs.h"

namespace sirtaki {

constexpr Knob live_knobs[] = {Knob::fusion_threshold, Knob::report_bytes, Knob::report_window,
                               Knob::chunk_bytes,      Knob::spin,         Knob::hand_over};

std::optional<Knob> live_knob(std::string_view name);  // nullopt: it is none

// A value for each live knob, in their order: numbers, nanoseconds, or positions of a choice.
using LiveValues = std::vector<int64_t>;

// Returns the value of a live knob among such values.
int64_t value_in(const LiveValues& values, Knob knob);

class LiveSettings {
 public:
  explicit LiveSettings(const Config& config);

  // Functions for any thread.

  int64_t in_use(Knob knob) const { return slot(in_use_, knob).load(std::memory_order_relaxed); }
  void wish(Knob knob, int64_t value);

  // Functions for the driver.

  // Returns the values that are wished for, if one of them has changed since the last call.
  std::optional<LiveValues> take_wishes();
  void use(const LiveValues& values);

 private:
  using Slots = std::array<std::atomic<int64_t>, std::size(live_knobs)>;
  static const std::atomic<int64_t>& slot(const Slots& slots, Knob knob);

  Slots in_use_, wished_;
  std::atomic<bool> has_wishes_{false};
};

}  // namespace sirtaki
