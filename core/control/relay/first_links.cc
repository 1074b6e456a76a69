#include "control/relay/first_links.h"

#include <algorithm>
#include <map>

namespace sirtaki {
namespace {

using Ranks = std::vector<int32_t>;

// Adds those elements of a ring that are next to the element at an index.
template <typename T, typename Add>
void visit_adjacent(const std::vector<T>& ring, size_t index, Add&& add) {
  if (ring.size() < 2) return;
  add(ring[(index + 1) % ring.size()]);
  add(ring[(index + ring.size() - 1) % ring.size()]);
}

// Adds the ranks of another host that are linked with the rank at a place of this one, which has `count` ranks.
void add_matches(const Ranks& other, size_t place, size_t count, Ranks& peers) {
  if (count >= other.size()) return peers.push_back(other[place % other.size()]);
  for (size_t match = place; match < other.size(); match += count) peers.push_back(other[match]);
}

}  // namespace

Ranks first_links(int32_t rank, const std::vector<int32_t>& hosts, const ControlTree& tree, size_t few) {
  std::map<int32_t, Ranks> by_host;
  for (int32_t other = 0; other < tree.size(); ++other) by_host[hosts[static_cast<size_t>(other)]].push_back(other);
  std::vector<const Ranks*> ring;  // of hosts
  size_t own = 0;
  for (const auto& [host, ranks] : by_host) {
    if (host == hosts[static_cast<size_t>(rank)]) own = ring.size();
    ring.push_back(&ranks);
  }
  const Ranks& here = *ring[own];
  const auto place = static_cast<size_t>(std::ranges::find(here, rank) - here.begin());

  Ranks peers = tree.children(rank);
  if (tree.parent(rank) >= 0) peers.push_back(tree.parent(rank));
  visit_adjacent(here, place, [&](int32_t peer) { peers.push_back(peer); });
  const auto add = [&](const Ranks* host) { add_matches(*host, place, here.size(), peers); };
  if (ring.size() - 1 > few) {
    visit_adjacent(ring, own, add);
  } else {
    for (size_t host = 0; host < ring.size(); ++host)
      if (host != own) add(ring[host]);
  }
  std::ranges::sort(peers);
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

}  // namespace sirtaki
