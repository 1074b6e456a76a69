// The choice of an all-reduce's algorithm when not all of it can go through one host's shared memory. All members have
// to make the same choice, so it depends only on what they all know.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sirtaki {

enum class Algorithm {
  direct,              // pairwise slices, in rank order: the same bits wherever the ranks live
  ring,                // from neighbour to neighbour
  recursive_doubling,  // few bytes, few waits; in a tree's order
  hierarchical,        // inside hosts first, then between them
};

// Chooses an algorithm. `wish` is the knob cpu_algorithm: "auto", or the name of an algorithm, used wherever it can be.
Algorithm choose_algorithm(std::string_view wish, const std::vector<int>& members_per_host, int64_t bytes);

// Counts the members of a transfer on each host that has any. `host_of` is by rank of the world.
std::vector<int> count_members(const std::vector<int32_t>& members, const std::vector<int32_t>& host_of);

// Describes the algorithm of a world of several hosts, for people.
std::string describe_algorithm(std::string_view wish, const std::vector<int>& ranks_per_host, bool has_shared_memory);

}  // namespace sirtaki
