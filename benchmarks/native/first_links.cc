// The links with which the ranks of a job start, as the core chooses them: how many, and how they wait for each other.
//
//   first_links ranks=512 each=8 fan_out=16
//
// A rank connects to its lower peers one after another, in ascending order, and accepts higher ones only then. Prints
// one JSON object: the links of the rank that has most of them, those of all ranks, each counted once, and the length
// of the longest chain of connections of which each waits for the one before. Ranks of a host share memory: the first
// one passes it to the others over a connection to each.
#include "control/first_links.h"

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

  size_t most = 0, all = 0;
  std::vector<int> ready;  // by rank: the step from which it accepts
  for (int32_t rank = 0; rank < tree.size(); ++rank) {
    std::vector<int32_t> peers = sirtaki::first_links(rank, hosts, tree, static_cast<size_t>(numbers.get("fan_out")));
    std::erase_if(peers, [&](int32_t peer) {
      const int32_t first = model.host_of(rank) * model.ranks_a_host;
      return model.host_of(peer) == model.host_of(rank) && rank != first && peer != first;
    });
    most = std::max(most, peers.size());
    int step = 0;
    for (int32_t peer : peers) {
      if (peer >= rank) continue;
      step = std::max(step, ready[static_cast<size_t>(peer)]) + 1;
      ++all;
    }
    ready.push_back(step);
  }
  std::printf("{\"most\": %zu, \"all\": %zu, \"chain\": %d}\n", most, all, std::ranges::max(ready));
}
