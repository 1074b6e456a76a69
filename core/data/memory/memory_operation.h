// The base of the shared-memory collectives: chunk slots, milestones, and the rule for reusing a slot.
//
// Terms: a chunk is the part of the buffer in flight. A rank writes it into one of its own slots, in turn, and its
// milestone (plan number, step) shows its progress to the others. A slot is reused only when all its readers have
// published a milestone after their reading: its lease.
#pragma once

#include <vector>

#include "data/memory/streaming_store_policy.h"
#include "data/operation.h"
#include "data/packing.h"
#include "transport/memory/local_peers.h"

namespace sirtaki {

struct Lease {
  uint64_t until = 0;        // the milestone that each reader must reach
  std::vector<int> readers;  // slots
};

// The state of a rank's slots, kept from one operation to the next.
struct SlotState {
  std::vector<Lease> leases = std::vector<Lease>(SharedRegion::slots_each);  // one per turn
  StreamingStorePolicy streaming_stores;
};

struct MemorySetting {
  LocalPeers& local_peers;
  SlotState& state;
  const Kernels& kernels;
};

class MemoryOperation : public Operation {
 public:
  // earlier_steps: those of the same transfer before the first one of the algorithm.
  MemoryOperation(const MemorySetting& setting, TransferPtr transfer, int64_t earlier_steps = 0);

  Status advance(Nanoseconds now, Progress& progress) final;
  std::vector<int32_t> waits_for() const final;

 protected:
  // Runs one step of the algorithm. Returns false if it must wait for others. Its milestone is published if a member
  // awaits it.
  virtual bool step(int64_t index) = 0;
  // Returns whether a member waits for the milestone after a step.
  virtual bool is_awaited(int64_t) const { return true; }
  // Returns whether every rank reduces everything, and not only a part.
  virtual bool reduces_all() const { return false; }
  // Set by the constructor of the algorithm. Steps and rounds count from 0.
  int64_t steps = 0;
  int64_t rounds = 0;
  bool is_followed = false;  // set by the last step: another operation goes on with the same transfer

  // Returns the slot that a rank uses in a round, which all members can compute. Successive plans of the same size
  // alternate, so that a plan need not wait until the slot that was filled last has been read.
  uint64_t turn(int64_t round) const {
    return (rounds % SharedRegion::slots_each ? transfer_->plan + static_cast<uint64_t>(transfer_->phase) : 0) +
           static_cast<uint64_t>(round);
  }

  const Transfer& transfer() const { return *transfer_; }
  const DTypeKernels& arithmetic() const { return *arithmetic_; }
  size_t member_count() const { return slots_.size(); }
  const std::vector<int>& slots() const { return slots_; }  // by member
  LocalPeers& local_peers() const { return setting_.local_peers; }
  int64_t chunk_bytes() const { return chunk_bytes_; }
  uint8_t* chunk(size_t member, int64_t round) const {
    return setting_.local_peers.region().chunk(slots_[member], turn(round));
  }

  // Return whether all members (or one) have finished step `index`; if not, record the awaited milestone.
  bool all_past(int64_t index);
  bool is_past(size_t member, int64_t index);
  // Records that this rank waits for the others to end the operation, or the world.
  void await_end() { awaited_ = Milestone(transfer_->plan, Milestone::last_step).value(); }

  // Return whether the slot of this round may be written; lease it, once written, until all readers have finished
  // step `until_past_index`.
  bool may_write(int64_t round);
  void lend(int64_t round, int64_t until_past_index);

  // Reduces bytes of all members, by member in `sources`, into `out`: those from `position` on of what this rank
  // receives. The first value of a sum that is not finite is noted with its rank.
  void reduce(uint8_t* out, const std::vector<const void*>& sources, int64_t bytes, int64_t position) const;

  // Packs a list's prescaled bytes [begin, end) into this rank's chunk of a round, at an offset.
  void pack_chunk(const ScatterList& list, int64_t begin, int64_t end, int64_t round, int64_t offset = 0);

  // Returns the number of rounds for this many bytes, at `each` bytes per round.
  static int64_t rounds_for(int64_t bytes, int64_t each) { return (bytes + each - 1) / each; }

 private:
  NotFinite find_not_finite(const uint8_t* out, const std::vector<const void*>& sources, size_t elements,
                            int64_t position) const;
  bool measures() const { return transfer_->times && transfer_->times->are_measured; }

  MemorySetting setting_;
  const DTypeKernels* arithmetic_;  // nullptr if nothing is reduced
  TransferPtr transfer_;
  int64_t chunk_bytes_;
  std::vector<int> slots_;       // by member
  int64_t earlier_steps_;
  int64_t next_ = 0;
  uint64_t awaited_ = 0;         // the awaited milestone

  // Returns the milestone after `done` steps of this transfer. Steps are counted across the phases of a plan.
  Milestone after(int64_t done) const;
};

std::unique_ptr<Operation> make_memory_allreduce(const MemorySetting& setting, TransferPtr transfer);
// An all-reduce whose data passes through the chunk slots, wherever the tensors are.
std::unique_ptr<Operation> make_staged_allreduce(const MemorySetting& setting, TransferPtr transfer,
                                                 int64_t earlier_steps);
std::unique_ptr<Operation> make_memory_reducescatter(const MemorySetting& setting, TransferPtr transfer);
// Broadcast, all-gather and all-to-all.
std::unique_ptr<Operation> make_memory_mover(const MemorySetting& setting, TransferPtr transfer);
// One whose data passes through the chunk slots.
std::unique_ptr<Operation> make_staged_mover(const MemorySetting& setting, TransferPtr transfer, int64_t earlier_steps);

class MemoryBackend final : public Backend {
 public:
  MemoryBackend(LocalPeers& local_peers, const Kernels& kernels);
  BackendName name(const Transfer&) const override { return BackendName::shared_memory; }
  bool serves(const Transfer& transfer) const override;
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer&) const override { return needs_slots; }

 private:
  LocalPeers& local_peers_;
  const Kernels& kernels_;
  SlotState state_;
};

}  // namespace sirtaki
