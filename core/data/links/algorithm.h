// The choice of an all-reduce's algorithm if its members are on several hosts, or have no shared memory. All members
// must make the same choice, so it depends only on what is the same for all of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sirtaki {

enum class Algorithm {
  direct,              // pairwise slices, summed in rank order: the same bits for every placement of ranks
  ring,                // around a ring of ranks
  recursive_doubling,  // few bytes in few steps; summed in the order of a tree
  hierarchical,        // within each host first, then between hosts
};

// Chooses an algorithm. `wish` is the knob cpu_algorithm: "auto", or the name of an algorithm, used wherever
// possible.
Algorithm choose_algorithm(std::string_view wish, const std::vector<int>& members_per_host, int64_t bytes);

// Counts the members of a transfer on each host that has any. `host_of`: by rank of the world.
std::vector<int> count_members(const std::vector<int32_t>& members, const std::vector<int32_t>& host_of);

// Describes the algorithm of a world of several hosts, for the log. `transport`: the setting.
std::string describe_algorithm(std::string_view wish, const std::vector<int>& ranks_per_host,
                               std::string_view transport);

}  // namespace sirtaki
