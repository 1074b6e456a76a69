// Reads tensors of the other ranks of a host where they are (process_vm_readv(2)): one copy instead of the two that a
// shared chunk needs.
//
// Each rank has a nonce, a random word, in its own memory, and publishes the word and its address. A read ends with
// that word. If it is the published one, then what was read before was memory of that rank, and the rank had not
// withdrawn it: its process has neither ended nor called exec(), and its number belongs to no other process.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "transport/memory/shared_region.h"

namespace sirtaki {

class PeerMemory {
 public:
  static constexpr size_t most_parts = 1000;  // of a read; the kernel accepts 1,024 (IOV_MAX)

  // Publishes this rank's nonce and, if it is wanted, whether the system lets it read the memory of others.
  PeerMemory(const SharedRegion& region, int own_slot, bool is_wanted);
  ~PeerMemory() { withdraw(); }
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Returns whether the rank in a slot reads the memory of others: all ranks that take part in an operation with it
  // see the same answer.
  bool reads_peers(int slot) const { return region_.rank(slot).reads_peers.load(std::memory_order_acquire) != 0; }

  // Copies parts of another rank's memory to parts of this rank's, both of the same length in total, and clears the
  // lists. Returns whether all of it was read, and was that rank's to give.
  bool read(int slot, std::vector<iovec>& from, std::vector<iovec>& to) const;

  // From now on, no read of this rank's memory succeeds.
  void withdraw() { nonce_.store(0, std::memory_order_seq_cst); }

  // Records that this rank could not read the data of an operation; published with its next milestone.
  void note_unread(uint64_t operation) {
    has_failed_ = true;
    own().unread.store(operation, std::memory_order_relaxed);
  }
  bool has_failed() const { return has_failed_; }  // a read of this rank
  bool has_not_read(int slot, uint64_t operation) const {
    return region_.rank(slot).unread.load(std::memory_order_relaxed) == operation;
  }

 private:
  RankBlock& own() const { return region_.rank(own_slot_); }
  bool may_read_peers() const;

  const SharedRegion& region_;
  int own_slot_;
  std::atomic<uint64_t> nonce_;
  bool has_failed_ = false;
};

}  // namespace sirtaki
