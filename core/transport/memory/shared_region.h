// The memory that the ranks of one host share: the depth of each rank's sleep, its progress, the reason of an abort,
// byte rings for control frames, and two chunk slots per rank for data. The arena (shared_arena.h) follows it.
//
// Ranks communicate here only through atomics. If one rank writes and then checks whether another sleeps, while the
// other publishes its sleep and then checks for work, both use sequentially consistent operations, so that at least
// one of them sees the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/settings/knobs.h"
#include "base/status.h"
#include "base/system/descriptor.h"
#include "transport/memory/shared_arena.h"

namespace sirtaki {

constexpr size_t cache_line = 128;  // two lines, because the processor fetches them in pairs

// The wake-up that a rank needs, by the depth of its sleep.
enum class Attention : uint32_t {
  awake,          // it polls: none
  idle,           // its engine sleeps and no plan is moving: a doorbell for a frame
  engine_sleeps,  // its engine sleeps during a plan: a doorbell for anything
  waiter_sleeps,  // a caller sleeps during a plan: a doorbell for anything
};

// A rank's progress in executing plans: a plan's number and a step within it, as one ordered value.
class Milestone {
 public:
  static constexpr uint64_t last_step = (uint64_t{1} << 28) - 1;
  Milestone() = default;
  Milestone(uint64_t plan, uint64_t step) : value_(plan << 28 | step) {}
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

struct alignas(cache_line) RankBlock {
  alignas(cache_line) std::atomic<uint64_t> milestone;
  alignas(cache_line) std::atomic<uint32_t> attention;
  std::atomic<uint32_t> finished;  // 1: it has said goodbye
  // Tensors in the arena. offer: the last milestone with which it has offered its tensors to the other ranks, so that
  // they write results there. withdrawn, writing: see in_place_allreduce.cc.
  alignas(cache_line) std::atomic<uint64_t> offer;
  std::atomic<uint32_t> withdrawn, writing;
  // Tensors elsewhere, which other ranks read where they are: see peer_memory.h. unread: the last operation whose data
  // this rank could not read.
  alignas(cache_line) std::atomic<uint64_t> nonce, nonce_address;
  std::atomic<uint32_t> process, reads_peers;
  std::atomic<uint64_t> unread;
};

// One direction of a byte ring between two ranks.
struct alignas(cache_line) RingHeader {
  alignas(cache_line) std::atomic<uint64_t> written;
  alignas(cache_line) std::atomic<uint64_t> consumed;
};

// The layout, written by the rank that creates the memory; zeros in memory that a caller has mapped.
struct alignas(cache_line) RegionHeader {
  int64_t bytes = 0;  // of the region, which the arena follows
  int64_t section_bytes = 0;  // of each rank in the arena; 0: there is none
};

// The reason why the job was given up; the first rank to write it is the origin.
struct alignas(cache_line) AbortRecord {
  std::atomic<uint32_t> state;  // 0: none, 1: being written, 2: readable
  uint32_t status;
  uint32_t rank;
  uint32_t length;
  uint64_t decision;
  char text[4096];
};

class SharedRegion {
 public:
  static constexpr size_t ring_bytes = 128 << 10;
  static constexpr int64_t chunks_a_cache = 4;  // one written, one read, and two of the user's memory
  static constexpr int slots_each = 2;  // chunk slots per rank: one is filled while the other is read

  // Returns the size of a chunk at the start. With autotune, slots are larger where that is less than 1 MiB.
  static int64_t initial_chunk_bytes(const Config& config, int slot_count);
  static int64_t bytes_needed(const Config& config, int slot_count);
  // Returns the size of a chunk if the setting is 0: the few chunks that a rank handles at a time, and those of the
  // ranks that share its core, must fit into its second-level cache.
  static int64_t fitting_chunk_bytes(int64_t cache_bytes, int ranks, int cores);
  // Returns the layout for this many slots. The ranks of a host may share all of its memory as tensors.
  static RegionHeader layout(const Config& config, int slot_count);
  // Makes and seals the memory; fails if the operating system refuses it. Its chunks are given back, and allocated
  // again by their ranks; the arena is allocated later.
  static Status create(const RegionHeader& layout, int slot_count, Descriptor& out);

  // Maps the descriptor, or uses an existing mapping.
  static Status open(const Config& config, int fd, uintptr_t address, int slot_count,
                     std::unique_ptr<SharedRegion>& out);
  // Allocates the chunks of a slot. The rank that writes them calls it, so that on a machine with several memory nodes
  // (NUMA) they lie on its own.
  Status allocate_chunks(int fd, int slot) const;
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  RankBlock& rank(int slot) const;
  AbortRecord& abort_record() const;
  RingHeader& ring(int from, int to) const;  // one of the two is slot 0, because all control frames are to or from it
  uint8_t* ring_data(int from, int to) const;
  uint8_t* chunk(int slot, uint64_t turn) const;
  size_t chunk_bytes() const { return chunk_bytes_; }
  // Returns the size of the chunks for a wish, the same on all ranks of the host; 0: as large as a slot.
  int64_t chunk_bytes_for(int64_t wish) const;
  int slot_count() const { return slot_count_; }
  // Returns the place of the arena in the descriptor, once it was checked that it is all there.
  const ArenaPlace& arena() const { return arena_; }

 private:
  static Status read_layout(int fd, int64_t least, int slot_count, RegionHeader& out);
  SharedRegion(uint8_t* base, size_t mapped, int slot_count, size_t chunk_bytes, const ArenaPlace& arena)
      : base_(base), mapped_(mapped), slot_count_(slot_count), chunk_bytes_(chunk_bytes), arena_(arena) {}
  size_t ring_offset(int from, int to) const;

  uint8_t* base_;
  size_t mapped_;  // bytes to unmap; 0: the mapping belongs to the caller
  int slot_count_;
  size_t chunk_bytes_;
  ArenaPlace arena_;
};

}  // namespace sirtaki
