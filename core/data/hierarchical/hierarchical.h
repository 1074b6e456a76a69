// Transfers between hosts that have several members each: every byte is sent between two hosts once, and then
// distributed within them. As in Karonis et al., "Exploiting Hierarchy in Parallel Computer Networks to Optimize
// Collective Operation Performance" (2000).
#pragma once

#include <string>
#include <vector>

#include "data/hierarchical/phases.h"

namespace sirtaki {

struct HierarchyParts {
  std::vector<Backend*> inside;   // within a host; the first that serves a transfer runs it
  Backend* between = nullptr;     // among members of different hosts
  std::vector<int32_t> host_of;   // by rank of the world
  std::string wish;               // the knob cpu_algorithm
};

class HierarchicalBackend final : public Backend {
 public:
  explicit HierarchicalBackend(HierarchyParts parts) : parts_(std::move(parts)) {}
  BackendName name(const Transfer&) const override { return BackendName::hierarchical; }
  bool serves(const Transfer& transfer) const override;
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer&) const override { return needs_slots | needs_links; }

 private:
  HierarchyParts parts_;
};

// The base of the hierarchical operations: the members of a transfer by host, and transfers among some of them.
class Hierarchical : public PhasedOperation {
 protected:
  using Members = std::vector<size_t>;  // indices into the whole transfer's members

  Hierarchical(const HierarchyParts& parts, TransferPtr whole);

  const Transfer& whole() const { return *whole_; }
  const std::vector<Members>& hosts() const { return hosts_; }
  const Members& local() const { return hosts_[own_host_]; }
  size_t own_place() const { return own_place_; }  // index among the local members
  bool is_alone() const { return local().size() == 1; }

  // Returns a transfer of this kind among some members, including this rank; the caller adds its lists of memory.
  std::shared_ptr<Transfer> among(const Members& members, Kind kind) const;
  int add_local(std::shared_ptr<Transfer> transfer, int after = no_phase);
  int add_between(std::shared_ptr<Transfer> transfer, int after = no_phase);

  // Returns the list with the operation's own memory for parts without an output, whose data must be forwarded.
  ScatterList with_memory(const ScatterList& list);

  static size_t index_in(const Members& members, size_t member);
  // Return a copy of the list with its outputs as both input and output; with its inputs only; with its outputs as
  // inputs only; with its outputs only; with sizes only.
  static ScatterList in_place(const ScatterList& list);
  static ScatterList inputs(const ScatterList& list);
  static ScatterList results(const ScatterList& list);
  static ScatterList outputs(const ScatterList& list);
  static ScatterList sizes(const ScatterList& list);

  // Returns the bytes that are in one phase at a time, of a plan of `total` bytes, while others are in other phases.
  int64_t bytes_a_piece(int64_t total) const;
  // Returns into how many pieces each of these lists, of which all ranks know the sizes, is cut.
  size_t count_pieces(const std::vector<ScatterList>& lists) const;
  // Returns one of that many pieces of a list.
  static ScatterList piece_of(const ScatterList& list, size_t piece, size_t pieces);

 private:
  const HierarchyParts& parts_;
  TransferPtr whole_;
  std::vector<Members> hosts_;  // by host
  size_t own_host_ = 0, own_place_ = 0;
  std::vector<std::unique_ptr<uint8_t[]>> memory_;
};

std::unique_ptr<Operation> make_hierarchical_allreduce(const HierarchyParts& parts, TransferPtr whole);
std::unique_ptr<Operation> make_hierarchical_broadcast(const HierarchyParts& parts, TransferPtr whole);
std::unique_ptr<Operation> make_hierarchical_allgather(const HierarchyParts& parts, TransferPtr whole);
std::unique_ptr<Operation> make_hierarchical_reducescatter(const HierarchyParts& parts, TransferPtr whole);

}  // namespace sirtaki
