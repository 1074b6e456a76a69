// The reporting tree of ranks on several hosts. The lowest rank of each host is its leader, and the leaders form a
// tree with rank 0 at its root. Every rank computes the same tree from the same input.
#pragma once

#include <cstdint>
#include <vector>

#include "control/messages/rank_bits.h"

namespace sirtaki {

class ControlTree {
 public:
  // Builds the tree. `hosts`: for each rank, the number of its host. `fan_out`: the number of other hosts that report
  // directly to a leader.
  ControlTree(const std::vector<int32_t>& hosts, int32_t fan_out);

  int32_t size() const { return static_cast<int32_t>(parents_.size()); }
  int32_t parent(int32_t rank) const { return parents_[static_cast<size_t>(rank)]; }  // -1 for rank 0
  const std::vector<int32_t>& children(int32_t rank) const { return children_[static_cast<size_t>(rank)]; }

  // Returns the rank and all ranks below it, ascending.
  std::vector<int32_t> subtree(int32_t rank) const;
  RankBits subtree_bits(int32_t rank) const;

 private:
  std::vector<int32_t> parents_;
  std::vector<std::vector<int32_t>> children_;
};

}  // namespace sirtaki
