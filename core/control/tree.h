// Who reports to whom, when ranks are on several hosts: on each host the lowest rank leads, and leaders form a tree
// with rank 0 at its root. Every rank works this out for itself, from the same numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "control/rank_bits.h"

namespace sirtaki {

class ControlTree {
 public:
  // `hosts`: for each rank, the number of its host. `fan_out`: how many other hosts a leader reports for directly.
  ControlTree(const std::vector<int32_t>& hosts, int32_t fan_out);

  int32_t size() const { return static_cast<int32_t>(parents_.size()); }
  int32_t parent(int32_t rank) const { return parents_[static_cast<size_t>(rank)]; }  // -1: of rank 0
  const std::vector<int32_t>& children(int32_t rank) const { return children_[static_cast<size_t>(rank)]; }

  // Whether one rank's reports pass through the other. A rank is not above itself.
  bool is_above(int32_t ancestor, int32_t rank) const;

  // The rank and all below it, ascending.
  std::vector<int32_t> subtree(int32_t rank) const;
  RankBits subtree_bits(int32_t rank) const;

 private:
  std::vector<int32_t> parents_;
  std::vector<std::vector<int32_t>> children_;
};

}  // namespace sirtaki
