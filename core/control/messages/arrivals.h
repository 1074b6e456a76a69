// The times at which a group of ranks requested one operation: enough to compute how long it has waited, and which
// rank delayed the others for how long.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "base/clock.h"

namespace sirtaki {

constexpr Nanoseconds long_ago = INT64_MIN;

struct Arrivals {
  Nanoseconds first = never;
  Nanoseconds latest = long_ago;
  Nanoseconds before_latest = long_ago;  // the latest among the other ranks
  int32_t last_rank = -1;

  static Arrivals of(int32_t rank, Nanoseconds moment) { return {moment, moment, long_ago, rank}; }

  // Merges another group's arrivals. The result does not depend on the order of merges.
  void merge(const Arrivals& other) {
    const bool is_later = std::tie(other.latest, other.last_rank) > std::tie(latest, last_rank);
    before_latest = std::max({before_latest, other.before_latest, std::min(latest, other.latest)});
    first = std::min(first, other.first);
    if (!is_later) return;
    latest = other.latest;
    last_rank = other.last_rank;
  }

  bool operator==(const Arrivals&) const = default;
};

}  // namespace sirtaki
