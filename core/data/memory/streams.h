// Operations that only move, as one stream of bytes per member: its data for all members, or its parts for the others,
// one after another. Of each stream a member wants one part.
#pragma once

#include <algorithm>
#include <vector>

#include "data/operation.h"
#include "data/packing.h"

namespace sirtaki {

struct Streams {
  explicit Streams(const Transfer& transfer) : wanted(transfer.members.size()) {
    if (transfer.kind == Kind::broadcast) list_broadcast(transfer);
    else if (transfer.kind == Kind::alltoall) list_parts(transfer);
    else list_gathered(transfer);
  }

  ScatterList own;
  std::vector<Slice> wanted;  // by member: the part of its stream for this rank
  int64_t longest = 0;        // bytes of the longest stream

 private:
  void list_broadcast(const Transfer& transfer) {
    longest = transfer.buffer.bytes();
    if (transfer.own == transfer.root) own = transfer.buffer;
    else wanted[transfer.root] = {0, longest};
  }

  void list_gathered(const Transfer& transfer) {
    own = transfer.buffer;
    for (size_t from = 0; from < wanted.size(); ++from) {
      const int64_t bytes = transfer.incoming[from].bytes();
      if (from != transfer.own) wanted[from] = {0, bytes};
      longest = std::max(longest, bytes);
    }
  }

  void list_parts(const Transfer& transfer) {
    for (size_t from = 0; from < wanted.size(); ++from) {
      int64_t length = 0;
      for (size_t to = 0; to < wanted.size(); ++to) {
        if (to == from) continue;
        if (to == transfer.own) wanted[from] = {length, transfer.incoming[from].bytes()};
        if (from == transfer.own) own.append(transfer.outgoing[to]);
        length += transfer.flow(from, to);
      }
      longest = std::max(longest, length);
    }
  }
};

// Returns how many bytes one member wants from all others, at most: the same on all members.
inline int64_t most_wanted(const Transfer& transfer) {
  if (transfer.kind == Kind::broadcast) return transfer.buffer.bytes();
  const size_t members = transfer.members.size();
  int64_t most = 0;
  if (transfer.kind == Kind::alltoall) {
    for (size_t to = 0; to < members; ++to) {
      int64_t bytes = 0;
      for (size_t from = 0; from < members; ++from)
        if (from != to) bytes += transfer.flow(from, to);
      most = std::max(most, bytes);
    }
    return most;
  }
  int64_t least = transfer.incoming.front().bytes();
  for (const ScatterList& rows : transfer.incoming) {
    most += rows.bytes();
    least = std::min(least, rows.bytes());
  }
  return most - least;
}

}  // namespace sirtaki
