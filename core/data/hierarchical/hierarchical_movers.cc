// Broadcast and all-gather over several hosts: bytes are sent to one member of each other host, which forwards them
// to the other members there.
#include <algorithm>

#include "data/hierarchical/hierarchical.h"
#include "data/packing.h"

namespace sirtaki {
namespace {

// A broadcast from the root to the first member of each other host, and from these, piece by piece, to the other
// members.
class HierarchicalBroadcast final : public Hierarchical {
 public:
  HierarchicalBroadcast(const HierarchyParts& parts, TransferPtr transfer) : Hierarchical(parts, std::move(transfer)) {
    for (const Members& members : hosts()) {
      const bool has_root = std::binary_search(members.begin(), members.end(), whole().root);
      host_roots_.push_back(has_root ? whole().root : members.front());
    }
    std::sort(host_roots_.begin(), host_roots_.end());
    const int64_t total = whole().buffer.bytes(), each = bytes_a_piece(total);
    for (int64_t begin = 0; begin < total; begin += each) add_piece(begin, std::min(begin + each, total));
  }

 private:
  void add_piece(int64_t begin, int64_t end) {
    const bool is_root = whole().own == whole().root;
    const bool is_host_root = std::binary_search(host_roots_.begin(), host_roots_.end(), whole().own);
    ScatterList own = whole().buffer.part(begin, end);
    if (is_host_root && !is_root && !is_alone()) own = with_memory(own);
    int arrived = no_phase;
    if (is_host_root) {
      auto transfer = among(host_roots_, Kind::broadcast);
      transfer->root = index_in(host_roots_, whole().root);
      transfer->buffer = own;
      const int phase = add_between(std::move(transfer));
      if (!is_root) arrived = phase;
    }
    if (is_alone()) return;
    auto transfer = among(local(), Kind::broadcast);
    transfer->root = index_in(local(), local_speaker());
    transfer->buffer = is_root ? inputs(own) : is_host_root ? results(own) : own;
    add_local(std::move(transfer), arrived);
  }

  size_t local_speaker() const {
    const auto is_root_of_host = [&](size_t member) {
      return std::binary_search(host_roots_.begin(), host_roots_.end(), member);
    };
    return *std::find_if(local().begin(), local().end(), is_root_of_host);
  }

  Members host_roots_;  // one per host
};

// An all-gather: each member's rows are sent to one member of each other host, chosen in turn, which forwards them.
// All rows are cut into the same number of pieces, so that one is sent while the previous one is forwarded.
class HierarchicalAllgather final : public Hierarchical {
 public:
  HierarchicalAllgather(const HierarchyParts& parts, TransferPtr transfer) : Hierarchical(parts, std::move(transfer)) {
    receivers_.resize(whole().members.size());
    for (const Members& from : hosts())
      for (size_t place = 0; place < from.size(); ++place)
        for (const Members& to : hosts())
          receivers_[from[place]].push_back(&from == &to ? from[place] : to[place % to.size()]);
    pieces_ = count_pieces(whole().incoming);
    for (size_t piece = 0; piece < pieces_; ++piece) {
      ScatterList got;  // rows that this rank forwards to the others of its host
      const int exchanged = add_exchange(piece, got);
      if (!is_alone()) add_gather(piece, got, exchanged);
    }
  }

 private:
  bool goes_to(size_t from, size_t to) const {
    return from != to && std::find(receivers_[from].begin(), receivers_[from].end(), to) != receivers_[from].end();
  }

  // Returns a piece of a member's rows.
  ScatterList rows_of(size_t member, size_t piece) const { return piece_of(whole().incoming[member], piece, pieces_); }

  int add_exchange(size_t piece, ScatterList& got) {
    Members all(whole().members.size());
    for (size_t member = 0; member < all.size(); ++member) all[member] = member;
    auto transfer = among(all, Kind::alltoall);
    transfer->flows.resize(all.size() * all.size());
    for (size_t from = 0; from < all.size(); ++from)
      for (size_t to : receivers_[from])
        if (to != from)
          transfer->flows[from * all.size() + to] = slice_of(whole().incoming[from].bytes(), pieces_, piece).bytes;
    const ScatterList own = got = piece_of(whole().buffer, piece, pieces_);
    for (size_t member = 0; member < all.size(); ++member) {
      transfer->outgoing.push_back(goes_to(whole().own, member) ? own : ScatterList());
      ScatterList& incoming = transfer->incoming.emplace_back();
      if (member == whole().own && is_alone()) incoming = rows_of(member, piece);
      if (!goes_to(member, whole().own)) continue;
      incoming = is_alone() ? rows_of(member, piece) : with_memory(rows_of(member, piece));
      got.append(results(incoming));
    }
    return add_between(std::move(transfer));
  }

  void add_gather(size_t piece, const ScatterList& got, int exchanged) {
    auto transfer = among(local(), Kind::allgather);
    transfer->buffer = got;
    for (size_t place = 0; place < local().size(); ++place) {
      const size_t via = local()[place];
      ScatterList& incoming = transfer->incoming.emplace_back(rows_of(via, piece));
      for (size_t from = 0; from < receivers_.size(); ++from)
        if (goes_to(from, via))
          incoming.append(place == own_place() ? sizes(rows_of(from, piece)) : rows_of(from, piece));
    }
    add_local(std::move(transfer), exchanged);
  }

  size_t pieces_ = 1;
  std::vector<Members> receivers_;  // by member: the members that receive its rows directly, one per host
};

}  // namespace

std::unique_ptr<Operation> make_hierarchical_broadcast(const HierarchyParts& parts, TransferPtr whole) {
  return std::make_unique<HierarchicalBroadcast>(parts, std::move(whole));
}

std::unique_ptr<Operation> make_hierarchical_allgather(const HierarchyParts& parts, TransferPtr whole) {
  return std::make_unique<HierarchicalAllgather>(parts, std::move(whole));
}

}  // namespace sirtaki
