// The processors on which simulated ranks run: one of its own for each rank, or a few that all ranks share.
#pragma once

#include <algorithm>
#include <vector>

#include "base/clock.h"

namespace virtual_network {

using sirtaki::Nanoseconds;

class Processors {
 public:
  // Creates the processors. `shared`: the number that all ranks share; 0: each rank has its own.
  Processors(int32_t ranks, int32_t shared)
      : shared_(static_cast<size_t>(shared)), ranks_(static_cast<size_t>(ranks)) {}

  // Returns when the rank, and a processor for it, is free.
  Nanoseconds is_free(int32_t rank) const {
    const Nanoseconds own = ranks_[static_cast<size_t>(rank)];
    return shared_.empty() ? own : std::max(own, *std::min_element(shared_.begin(), shared_.end()));
  }

  // Occupies a processor that is free, and the rank, until then.
  void occupy(int32_t rank, Nanoseconds until) {
    ranks_[static_cast<size_t>(rank)] = until;
    if (!shared_.empty()) *std::min_element(shared_.begin(), shared_.end()) = until;
  }

 private:
  std::vector<Nanoseconds> shared_, ranks_;  // when each is free
};

}  // namespace virtual_network
