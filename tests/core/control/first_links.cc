// The links with which ranks start: equal on both sides, few, and enough for news to reach every rank around one that
// is stopped.
#include "control/relay/first_links.h"

#include <algorithm>
#include <random>
#include <set>

#include "check.h"

using namespace sirtaki;

namespace {

constexpr size_t few = 4;

using Hosts = std::vector<int32_t>;  // by rank
using Graph = std::vector<std::set<int32_t>>;

Hosts hosts_of(const std::vector<int>& sizes) {
  Hosts hosts;
  for (size_t host = 0; host < sizes.size(); ++host)
    hosts.insert(hosts.end(), static_cast<size_t>(sizes[host]), static_cast<int32_t>(host));
  return hosts;
}

Graph graph_of(const Hosts& hosts, int32_t fan_out = 16) {
  const ControlTree tree(hosts, fan_out);
  Graph graph;
  for (int32_t rank = 0; rank < tree.size(); ++rank) {
    const std::vector<int32_t> peers = first_links(rank, hosts, tree, few);
    CHECK(std::ranges::is_sorted(peers));
    CHECK_EQUAL(std::ranges::count(peers, rank), 0);
    graph.emplace_back(peers.begin(), peers.end());
    CHECK_EQUAL(graph.back().size(), peers.size());
  }
  return graph;
}

// Returns how many ranks the news of one rank reach without the help of another.
size_t reached(const Graph& graph, int32_t from, int32_t without) {
  std::set<int32_t> known{from};
  std::vector<int32_t> next{from};
  while (!next.empty()) {
    const int32_t rank = next.back();
    next.pop_back();
    for (int32_t peer : graph[static_cast<size_t>(rank)])
      if (peer != without && known.insert(peer).second) next.push_back(peer);
  }
  return known.size();
}

void check_world(const Hosts& hosts, int32_t fan_out) {
  const Graph graph = graph_of(hosts, fan_out);
  const auto size = static_cast<int32_t>(hosts.size());
  const ControlTree tree(hosts, fan_out);
  for (int32_t rank = 0; rank < size; ++rank) {
    for (int32_t peer : graph[static_cast<size_t>(rank)]) CHECK(graph[static_cast<size_t>(peer)].count(rank) == 1);
    if (rank) CHECK(graph[static_cast<size_t>(rank)].count(tree.parent(rank)) == 1);
  }
  for (int32_t stopped = 0; stopped < size && size > 2; ++stopped)
    CHECK_EQUAL(reached(graph, stopped ? 0 : 1, stopped), static_cast<size_t>(size - 1));
}

}  // namespace

TEST(both_ranks_of_a_link_know_of_it_and_news_pass_around_any_rank) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int> sizes(1 + random() % 9);
    for (int& size : sizes) size = static_cast<int>(1 + random() % 6);
    Hosts hosts = hosts_of(sizes);
    if (trial % 2) std::shuffle(hosts.begin(), hosts.end(), random);  // ranks that were dealt out
    check_world(hosts, static_cast<int32_t>(1 + random() % 4));
  }
}

TEST(few_hosts_are_linked_with_each_other_at_every_place) {
  const Graph graph = graph_of(hosts_of({2, 2, 2}));
  CHECK(graph[0] == (std::set<int32_t>{1, 2, 4}));
  CHECK(graph[3] == (std::set<int32_t>{1, 2, 5}));
  CHECK(graph_of(hosts_of({3, 1}))[3] == (std::set<int32_t>{0, 1, 2}));
}

TEST(the_number_of_links_does_not_grow_with_the_ranks) {
  const Graph graph = graph_of(hosts_of(std::vector<int>(500, 8)));
  size_t most = 0;
  for (const auto& peers : graph) most = std::max(most, peers.size());
  CHECK_EQUAL(most, size_t{16 + 7 + 1 + 2});  // a leader: to those that report to it, its own leader, hosts beside it
  CHECK_EQUAL(graph[1234].size(), size_t{3 + 2});  // its leader and the ranks beside it; hosts beside it
}
