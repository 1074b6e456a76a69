// The links with which the ranks of a job start, as the core chooses them.
//
//   first_links ranks=512 each=8 fan_out=16
//
// A rank connects to its lower peers one after another, and accepts the higher ones meanwhile. Prints one JSON object:
// the links of the rank that has most of them, those of all ranks, each counted once, and the connections of the rank
// that connects to most others. Ranks of a host share memory: the first one passes it to the others over a connection
// to each.
#include "control/relay/first_links.h"

#include <algorithm>

#include "negotiating_world.h"

int main(int argument_count, char** arguments) {
  using namespace virtual_network;
  Numbers numbers = world_numbers();
  numbers.parse(argument_count, arguments);
  const Model model = network_model(numbers);
  const ControlTree tree = control_tree(numbers);
  std::vector<int32_t> hosts;
  for (int32_t rank = 0; rank < tree.size(); ++rank) hosts.push_back(model.host_of(rank));

  size_t most = 0, all = 0, connects = 0;
  for (int32_t rank = 0; rank < tree.size(); ++rank) {
    std::vector<int32_t> peers = sirtaki::first_links(rank, hosts, tree, static_cast<size_t>(numbers.get("fan_out")));
    std::erase_if(peers, [&](int32_t peer) {
      const int32_t first = model.host_of(rank) * model.ranks_a_host;
      return model.host_of(peer) == model.host_of(rank) && rank != first && peer != first;
    });
    const auto lower = static_cast<size_t>(std::ranges::count_if(peers, [&](int32_t peer) { return peer < rank; }));
    most = std::max(most, peers.size());
    connects = std::max(connects, lower);
    all += lower;
  }
  std::printf("{\"most\": %zu, \"all\": %zu, \"connects\": %zu}\n", most, all, connects);
}
