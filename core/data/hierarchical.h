// Transfers between hosts with several members each: every byte goes between two hosts once, and then spreads inside
// them. As in Karonis et al., "Exploiting Hierarchy in Parallel Computer Networks to Optimize Collective Operation
// Performance" (2000).
#pragma once

#include <string>
#include <vector>

#include "data/phases.h"

namespace sirtaki {

struct HierarchyParts {
  std::vector<Backend*> inside;   // the first that serves a transfer moves it among the members of a host
  Backend* between = nullptr;     // among members of different hosts
  std::vector<int32_t> host_of;   // by rank of the world
  std::string wish;               // the knob cpu_algorithm
};

class HierarchicalBackend final : public Backend {
 public:
  explicit HierarchicalBackend(HierarchyParts parts) : parts_(std::move(parts)) {}
  bool serves(const Transfer& transfer) const override;
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer&) const override { return needs_slots | needs_links; }

 private:
  HierarchyParts parts_;
};

// The common part of the hierarchical operations: where a transfer's members live, and transfers among some of them.
class Hierarchical : public PhasedOperation {
 protected:
  using Members = std::vector<size_t>;  // indices of the whole transfer's members

  Hierarchical(const HierarchyParts& parts, TransferPtr whole);

  const Transfer& whole() const { return *whole_; }
  const std::vector<Members>& hosts() const { return hosts_; }
  const Members& local() const { return hosts_[own_host_]; }
  size_t own_place() const { return own_place_; }  // among the local ones
  bool is_alone() const { return local().size() == 1; }

  // Returns a transfer of this kind among some members, including this rank; the caller fills in what moves.
  std::shared_ptr<Transfer> among(const Members& members, Kind kind) const;
  int add_local(std::shared_ptr<Transfer> transfer, int after = no_phase);
  int add_between(std::shared_ptr<Transfer> transfer, int after = no_phase);

  // Returns the list with memory of the operation where it has no output: what arrives has to be forwarded.
  ScatterList with_memory(const ScatterList& list);

  static size_t index_in(const Members& members, size_t member);
  // Return the list worked on in place, where its outputs are; its inputs alone; its outputs as inputs; its outputs
  // alone; its sizes alone.
  static ScatterList in_place(const ScatterList& list);
  static ScatterList inputs(const ScatterList& list);
  static ScatterList results(const ScatterList& list);
  static ScatterList outputs(const ScatterList& list);
  static ScatterList sizes(const ScatterList& list);

  // Returns the bytes of a plan that are in one phase at a time, while others are in other phases.
  int64_t bytes_a_piece() const;

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

}  // namespace sirtaki
