#include "control/relay/tree.h"

#include <algorithm>
#include <map>

namespace sirtaki {

ControlTree::ControlTree(const std::vector<int32_t>& hosts, int32_t fan_out)
    : parents_(hosts.size(), -1), children_(hosts.size()) {
  std::vector<int32_t> leaders;                // ascending
  std::map<int32_t, int32_t> leader_of;        // by host
  for (int32_t rank = 0; rank < size(); ++rank) {
    const auto [leader, leads] = leader_of.emplace(hosts[static_cast<size_t>(rank)], rank);
    int32_t& parent = parents_[static_cast<size_t>(rank)];
    if (!leads) {
      parent = leader->second;
    } else if (rank > 0) {
      parent = leaders[(leaders.size() - 1) / static_cast<size_t>(fan_out)];
    }
    if (leads) leaders.push_back(rank);
    if (parent >= 0) children_[static_cast<size_t>(parent)].push_back(rank);
  }
}

std::vector<int32_t> ControlTree::subtree(int32_t rank) const {
  std::vector<int32_t> ranks{rank};
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::vector<int32_t>& below = children(ranks[i]);
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

RankBits ControlTree::subtree_bits(int32_t rank) const {
  RankBits bits(size());
  for (int32_t below : subtree(rank)) bits.add(below);
  return bits;
}

}  // namespace sirtaki
