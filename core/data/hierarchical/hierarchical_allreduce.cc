// All-reduce in three phases: a reduce-scatter within each host, an all-reduce of each slice among its carriers, one
// per host, and an all-gather within each host. Each byte of the sum is sent between two hosts once in each
// direction, and all local ranks share the work. On hosts with more members than the smallest host, the additional
// members send their data to the carriers and receive the result from them.
//
// A large plan is cut into pieces, so that the network transfers one while others go through shared memory. Sums
// within a host are in rank order, and so are sums between hosts: every run gives the same bits as long as the ranks
// are on the same hosts. Sums are sent in the tensors' own dtype: 16-bit floats are rounded once within a host and
// once between hosts. A wire format is used between hosts only; then pieces and slices are cut where blocks begin.
#include <algorithm>
#include <optional>

#include "data/hierarchical/hierarchical.h"
#include "data/links/wire_blocks.h"
#include "data/packing.h"

namespace sirtaki {
namespace {

class HierarchicalAllreduce final : public Hierarchical {
 public:
  HierarchicalAllreduce(const HierarchyParts& parts, TransferPtr transfer)
      : Hierarchical(parts, std::move(transfer)), each_(bytes_a_piece(whole().buffer.bytes())),
        carriers_(local().size()) {
    if (whole().wire_format != WireFormat::exact) blocks_.emplace(whole().buffer);
    for (const Members& members : hosts()) carriers_ = std::min(carriers_, members.size());
    if (is_carrier()) {
      for (const Members& members : hosts()) counterparts_.push_back(members[own_place()]);
    }
    const int64_t total = whole().buffer.bytes();
    int64_t pieces = (total + each_ - 1) / each_;
    if (pieces > 1 && border((pieces - 1) * each_) == total) --pieces;
    summed_.resize(static_cast<size_t>(pieces), no_phase);
    // A piece is scattered before the previous one is gathered, so that ranks have work while the network transfers.
    for (int64_t i = 0; i <= pieces; ++i) {
      if (i < pieces) begin_piece(i);
      if (i > 0 && !is_alone()) gather(i - 1);
    }
    results_.clear();
  }

 private:
  bool is_carrier() const { return own_place() < carriers_; }

  // Returns a slice of the whole buffer; an empty one if the rank at this place is no carrier.
  ScatterList slice(int64_t piece, size_t place) const {
    if (place >= carriers_) return {};
    const int64_t begin = border(piece * each_);
    const int64_t end = border(std::min((piece + 1) * each_, whole().buffer.bytes()));
    const Slice part = slice_of(end - begin, carriers_, place);
    return whole().buffer.part(border(begin + part.begin), border(begin + part.begin + part.bytes));
  }

  // Returns the position, or the next one at which the buffer may be cut.
  int64_t border(int64_t position) const { return blocks_ ? blocks_->border(position) : position; }

  void begin_piece(int64_t piece) {
    const ScatterList own = is_alone() ? slice(piece, 0) : with_memory(slice(piece, own_place()));
    const int scattered = is_alone() ? no_phase : scatter(piece, own);
    if (is_carrier()) {
      auto transfer = among(counterparts_, Kind::allreduce);
      if (is_alone()) transfer->prescale = whole().prescale;
      transfer->postscale = whole().postscale;
      transfer->wire_format = whole().wire_format;
      transfer->buffer = is_alone() ? own : in_place(own);
      summed_[static_cast<size_t>(piece)] = add_between(std::move(transfer), scattered);
    }
    results_.push_back(results(own));
  }

  int scatter(int64_t piece, const ScatterList& own) {
    auto transfer = among(local(), Kind::reducescatter);
    transfer->prescale = whole().prescale;
    for (size_t place = 0; place < local().size(); ++place)
      transfer->outgoing.push_back(place == own_place() ? own : slice(piece, place));
    return add_local(std::move(transfer));
  }

  void gather(int64_t piece) {
    auto transfer = among(local(), Kind::allgather);
    transfer->buffer = results_[static_cast<size_t>(piece)];
    for (size_t place = 0; place < local().size(); ++place)
      transfer->incoming.push_back(place == own_place() ? sizes(transfer->buffer) : outputs(slice(piece, place)));
    add_local(std::move(transfer), summed_[static_cast<size_t>(piece)]);
  }

  std::optional<WireBlocks> blocks_;  // of the buffer, if its sums are encoded between hosts
  const int64_t each_;          // bytes of a piece
  size_t carriers_;             // number of slices: the members of the smallest host
  Members counterparts_;        // the carriers of this rank's slice, in the order of hosts
  std::vector<int> summed_;     // by piece: the phase that sums this rank's slice
  std::vector<ScatterList> results_;  // by piece: the result of this rank's slice
};

}  // namespace

std::unique_ptr<Operation> make_hierarchical_allreduce(const HierarchyParts& parts, TransferPtr whole) {
  return std::make_unique<HierarchicalAllreduce>(parts, std::move(whole));
}

}  // namespace sirtaki
