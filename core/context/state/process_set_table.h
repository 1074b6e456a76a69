// The process sets as this rank's callers see them. It is part of the CallerState, whose lock protects it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "plan/request.h"

namespace sirtaki {

struct ProcessSetEntry {
  bool has(int32_t rank) const { return std::binary_search(members.begin(), members.end(), rank); }

  std::vector<int32_t> members;  // ascending
  bool is_joined = false;        // this rank has joined, and submits nothing until all members have
};

class ProcessSetTable {
 public:
  explicit ProcessSetTable(int32_t world_size) {
    std::vector<int32_t> world(static_cast<size_t>(world_size));
    std::iota(world.begin(), world.end(), 0);
    add(world_set, std::move(world));
  }

  ProcessSetEntry* find(int32_t number) {
    const auto found = sets_.find(number);
    return found == sets_.end() ? nullptr : &found->second;
  }
  void add(int32_t number, std::vector<int32_t> members) { sets_[number] = {std::move(members), false}; }
  void remove(int32_t number) { sets_.erase(number); }

  // Returns the ranks of the sets that `rank` does not belong to.
  std::vector<int32_t> ranks_without(int32_t rank) const {
    std::vector<int32_t> ranks;
    for (const auto& [number, set] : sets_)
      if (!set.has(rank)) ranks.insert(ranks.end(), set.members.begin(), set.members.end());
    return ranks;
  }

 private:
  std::unordered_map<int32_t, ProcessSetEntry> sets_;
};

}  // namespace sirtaki
