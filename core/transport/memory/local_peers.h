// The local peers as seen in shared memory: their milestones, doorbells and goodbyes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/system/descriptor.h"
#include "transport/memory/peer_memory.h"
#include "transport/memory/shared_region.h"

namespace sirtaki {

// The reason why the job was given up, as shared among local peers.
struct Abort {
  bool is_there = false;
  srt_status status = SRT_ABORTED;
  int32_t rank = 0;
  std::string text;
  uint64_t decision = 0;  // the abort takes effect after this Decision
};

class LocalPeers {
 public:
  // Duplicates the descriptors. Slots are indices into the arrays of srt_memory.
  static Status open(const Config& config, const srt_memory& memory, std::unique_ptr<LocalPeers>& out);

  const SharedRegion& region() const { return *region_; }
  SharedArena& arena() const { return *arena_; }
  PeerMemory& memory() const { return *memory_; }
  int own_slot() const { return own_slot_; }
  int slot_count() const { return region_->slot_count(); }
  int32_t rank_in(int slot) const { return ranks_[static_cast<size_t>(slot)]; }
  int slot_of(int32_t rank) const;  // -1: on another host

  // Milestones. publish() also ensures that a local peer that sleeps during a plan is woken.
  void publish(Milestone milestone, Nanoseconds now);
  uint64_t milestone_of(int slot) const { return region_->rank(slot).milestone.load(std::memory_order_seq_cst); }

  // Records that frames were written to the ring of a slot.
  void frames_sent(int slot, Nanoseconds now);

  // Rings the doorbells that are due: those whose sleeper has not woken up after a short grace period. A caller that
  // returns within microseconds needs no system call and no second thread.
  void ring_due(Nanoseconds now);
  void ring_all() { ring_due(never); }  // rings all pending doorbells whose ranks still sleep

  void set_attention(Attention attention) {
    own().attention.store(static_cast<uint32_t>(attention), std::memory_order_seq_cst);
  }
  Attention attention_of(int slot) const;
  void wake_everyone();

  void say_goodbye() { own().finished.store(1, std::memory_order_seq_cst); }
  bool has_finished(int slot) const { return region_->rank(slot).finished.load(std::memory_order_seq_cst) != 0; }

  // Writes why the job was given up. The first rank's reason counts; later ones change nothing.
  void write_abort(const Abort& abort);
  Abort read_abort() const;

  // Return the descriptors that report a local peer's death; -1 if there is none.
  int process_descriptor(int slot) const { return bells_[static_cast<size_t>(slot)].process.get(); }
  int socket_descriptor(int slot) const { return bells_[static_cast<size_t>(slot)].socket.get(); }
  int own_engine_doorbell() const { return bells_[static_cast<size_t>(own_slot_)].engine.get(); }
  int own_waiter_doorbell() const { return bells_[static_cast<size_t>(own_slot_)].waiter.get(); }

  // Tensors in the arena: an offer lets the other ranks write results into this rank's tensors, until it withdraws.
  void offer(Milestone milestone) { own().offer.store(milestone.value(), std::memory_order_relaxed); }
  bool has_offered(int slot, Milestone milestone) const {
    return region_->rank(slot).offer.load(std::memory_order_relaxed) == milestone.value();
  }
  void withdraw() { own().withdrawn.store(1, std::memory_order_seq_cst); }
  // Begins to write into the tensors of these ranks, unless one of them has withdrawn.
  bool begin_writing(const std::vector<int>& slots);
  void end_writing() { own().writing.store(0, std::memory_order_release); }
  // Returns whether a peer still writes; one that has died does not.
  bool is_writing(int slot) const;

  void close();  // in a forked child

  // Closes the descriptors of a local peer whose death has been handled.
  void stop_watching(int slot);

 private:
  struct Bells {
    Descriptor engine, waiter, process, socket;
    bool is_gone = false;          // its death has been handled
    bool wanted = false;           // a doorbell is pending: the rank slept when this one had something for it
    Nanoseconds due = 0;           // the time at which it is rung
    Attention least = Attention::idle;  // the lightest sleep that must be interrupted
  };

  LocalPeers() = default;
  RankBlock& own() const { return region_->rank(own_slot_); }
  void want(int slot, Attention least, Nanoseconds now);
  void ring(int slot);

  std::unique_ptr<SharedRegion> region_;
  std::unique_ptr<SharedArena> arena_;
  std::unique_ptr<PeerMemory> memory_;
  int own_slot_ = 0;
  std::vector<int32_t> ranks_;
  std::vector<Bells> bells_;
  Nanoseconds next_ring_ = never;
};

}  // namespace sirtaki
