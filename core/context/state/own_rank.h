// This rank, the names of all ranks for messages, and this rank's local peers.
#pragma once

#include <string>

#include "plan/plan.h"
#include "transport/memory/local_peers.h"

namespace sirtaki {

struct OwnRank {
  const std::string& name() const { return name_of(rank); }
  const std::string& name_of(int32_t other) const { return names[static_cast<size_t>(other)]; }
  bool exists(int32_t other) const { return other >= 0 && static_cast<size_t>(other) < names.size(); }

  int32_t rank;
  const RankNames& names;
  LocalPeers* local_peers;  // nullptr without shared memory
};

}  // namespace sirtaki
