// Monotonic time in plain nanoseconds. State machines take the time as an argument, so that they can be run at any
// time.
#pragma once

#include <time.h>

#include <cstdint>

namespace sirtaki {

using Nanoseconds = int64_t;

constexpr Nanoseconds microseconds(int64_t n) { return n * 1'000; }
constexpr Nanoseconds milliseconds(int64_t n) { return n * 1'000'000; }
constexpr Nanoseconds seconds(int64_t n) { return n * 1'000'000'000; }
constexpr Nanoseconds never = INT64_MAX;

constexpr double in_seconds(Nanoseconds time) { return static_cast<double>(time) / 1e9; }

inline Nanoseconds now() {
  timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return seconds(moment.tv_sec) + moment.tv_nsec;
}

// The wall clock, in nanoseconds since 1970. Hosts share no other clock.
inline Nanoseconds wall_clock() {
  timespec moment;
  clock_gettime(CLOCK_REALTIME, &moment);
  return seconds(moment.tv_sec) + moment.tv_nsec;
}

}  // namespace sirtaki
