// Reduce-scatter in two phases, the first half of the hierarchical all-reduce: within each host, the member at each
// place sums what all local members have for the members at its place on all hosts; then these members exchange and add
// those sums. All hosts have the same number of members. Each byte of a member's sum is sent to its host once by each
// other host, and the order of additions is that of the all-reduce, so that both give the same bits.
#include "data/hierarchical/hierarchical.h"

namespace sirtaki {
namespace {

class HierarchicalReducescatter final : public Hierarchical {
 public:
  HierarchicalReducescatter(const HierarchyParts& parts, TransferPtr transfer)
      : Hierarchical(parts, std::move(transfer)) {
    for (const Members& members : hosts()) counterparts_.push_back(members[own_place()]);
    pieces_ = count_pieces(whole().outgoing);
    for (size_t piece = 0; piece < pieces_; ++piece) add_piece(piece);
  }

 private:
  // One piece goes between hosts while the next one is summed within each host.
  void add_piece(size_t piece) {
    std::vector<ScatterList> sums;  // of this host, for each counterpart
    for (size_t member : counterparts_) sums.push_back(with_memory(piece_for(member, piece)));
    auto within = among(local(), Kind::reducescatter);
    within->prescale = whole().prescale;
    for (size_t place = 0; place < local().size(); ++place) {
      ScatterList& list = within->outgoing.emplace_back();
      for (size_t host = 0; host < hosts().size(); ++host)
        list.append(place == own_place() ? sums[host] : piece_for(hosts()[host][place], piece));
    }
    const int summed = add_local(std::move(within));
    auto between = among(counterparts_, Kind::reducescatter);
    between->postscale = whole().postscale;
    for (size_t host = 0; host < hosts().size(); ++host)
      between->outgoing.push_back(counterparts_[host] == whole().own ? in_place(sums[host]) : results(sums[host]));
    add_between(std::move(between), summed);
  }

  ScatterList piece_for(size_t member, size_t piece) const {
    return piece_of(whole().outgoing[member], piece, pieces_);
  }

  Members counterparts_;  // the members at this rank's place, in the order of hosts
  size_t pieces_ = 1;
};

}  // namespace

std::unique_ptr<Operation> make_hierarchical_reducescatter(const HierarchyParts& parts, TransferPtr whole) {
  return std::make_unique<HierarchicalReducescatter>(parts, std::move(whole));
}

}  // namespace sirtaki
