// The common part of the shared-memory collectives: chunk slots, milestones, and when a slot may be used again.
//
// Words: a chunk is the piece of the buffer in flight; a rank writes it into one of its own slots (in turn), and its
// milestone (plan number, step) shows the others how far it is. A slot is written again only when all its readers have
// published a milestone past the reading: its lease.
#pragma once

#include <vector>

#include "data/operation.h"
#include "data/packing.h"
#include "data/streaming_store_policy.h"
#include "transport/local_peers.h"

namespace sirtaki {

struct Lease {
  uint64_t until = 0;        // milestone that each reader has to reach
  std::vector<int> readers;  // slots
};

// A rank's state of its slots, kept from one operation to the next.
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
  MemoryOperation(const MemorySetting& setting, TransferPtr transfer);

  Status advance(Nanoseconds now, Progress& progress) final;
  std::vector<int32_t> waits_for() const final;

 protected:
  // Runs one step of the algorithm, between two publications. Returns false if it has to wait for others.
  virtual bool step(int64_t index) = 0;
  // Set by the constructor of the algorithm. Steps and rounds count from 0.
  int64_t steps = 0;
  int64_t rounds = 0;

  // Returns the slot that a rank uses in a round; all members know it. Successive plans of one size alternate, so that
  // none has to wait until the slot that was filled last has been read.
  uint64_t turn(int64_t round) const {
    return (rounds % SharedRegion::slots_each ? transfer_->plan + static_cast<uint64_t>(transfer_->phase) : 0) +
           static_cast<uint64_t>(round);
  }

  const Transfer& transfer() const { return *transfer_; }
  const DTypeKernels& arithmetic() const { return *arithmetic_; }
  size_t member_count() const { return slots_.size(); }
  int64_t chunk_bytes() const { return static_cast<int64_t>(setting_.local_peers.region().chunk_bytes()); }
  uint8_t* chunk(size_t member, int64_t round) const {
    return setting_.local_peers.region().chunk(slots_[member], turn(round));
  }

  // Return whether all members (or one) have finished step `index`, and note the milestone that is awaited.
  bool all_past(int64_t index);
  bool is_past(size_t member, int64_t index);

  // may_write() returns whether the slot of this round may be written. lend(), once it is written, leases it until the
  // readers are past a step.
  bool may_write(int64_t round);
  void lend(int64_t round, int64_t until_past_index);

  // Packs a list's bytes [begin, end), prescaled, into this rank's chunk of a round, at an offset.
  void pack_chunk(const ScatterList& list, int64_t begin, int64_t end, int64_t round, int64_t offset = 0);

  // Returns the rounds that so many bytes take, at `each` bytes per round.
  static int64_t rounds_for(int64_t bytes, int64_t each) { return (bytes + each - 1) / each; }

 private:
  bool measures() const { return transfer_->times && transfer_->times->are_measured; }

  MemorySetting setting_;
  const DTypeKernels* arithmetic_;  // nullptr where nothing is reduced
  TransferPtr transfer_;
  std::vector<int> slots_;       // by member
  int64_t next_ = 0;
  uint64_t awaited_ = 0;         // the milestone that it waits for

  // Returns the milestone of a rank that has done so many steps of this transfer; steps count on from phase to phase.
  Milestone after(int64_t done) const;
};

std::unique_ptr<Operation> make_memory_allreduce(const MemorySetting& setting, TransferPtr transfer);
std::unique_ptr<Operation> make_memory_reducescatter(const MemorySetting& setting, TransferPtr transfer);
std::unique_ptr<Operation> make_memory_broadcast(const MemorySetting& setting, TransferPtr transfer);
// All-gather and all-to-all.
std::unique_ptr<Operation> make_memory_exchange(const MemorySetting& setting, TransferPtr transfer);

class MemoryBackend final : public Backend {
 public:
  MemoryBackend(LocalPeers& local_peers, const Kernels& kernels);
  bool serves(const Transfer& transfer) const override;
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer&) const override { return needs_slots; }

 private:
  LocalPeers& local_peers_;
  const Kernels& kernels_;
  SlotState state_;
};

}  // namespace sirtaki
