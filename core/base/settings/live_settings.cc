#include "base/settings/live_settings.h"

#include <algorithm>

namespace sirtaki {
namespace {

size_t place_of(Knob knob) {
  return static_cast<size_t>(std::find(std::begin(live_knobs), std::end(live_knobs), knob) - std::begin(live_knobs));
}

}  // namespace

std::optional<Knob> live_knob(std::string_view name) {
  for (Knob knob : live_knobs)
    if (name == knob_entry(static_cast<int>(knob))->name) return knob;
  return std::nullopt;
}

int64_t value_in(const LiveValues& values, Knob knob) { return values[place_of(knob)]; }

LiveSettings::LiveSettings(const Config& config) {
  for (size_t i = 0; i < std::size(live_knobs); ++i) {
    in_use_[i] = config.integer(live_knobs[i]);
    wished_[i] = config.integer(live_knobs[i]);
  }
}

const std::atomic<int64_t>& LiveSettings::slot(const Slots& slots, Knob knob) { return slots[place_of(knob)]; }

void LiveSettings::wish(Knob knob, int64_t value) {
  wished_[place_of(knob)].store(value, std::memory_order_relaxed);
  has_wishes_.store(true, std::memory_order_release);
}

std::optional<LiveValues> LiveSettings::take_wishes() {
  if (!has_wishes_.load(std::memory_order_relaxed) || !has_wishes_.exchange(false, std::memory_order_acquire))
    return std::nullopt;
  return LiveValues(wished_.begin(), wished_.end());
}

void LiveSettings::use(const LiveValues& values) {
  for (size_t i = 0; i < values.size(); ++i) in_use_[i].store(values[i], std::memory_order_relaxed);
}

}  // namespace sirtaki
