// An all-reduce of tensors that lie in the arena: each rank reduces its slice of all ranks' tensors in rank order, and
// writes the result into all of them. Every byte is read once and written once, without a copy in the shared region.
//
// A rank whose tensors are all in the arena, where results replace inputs, offers them: it lists their offsets in its
// directory and publishes a milestone of its own. If all ranks have offered theirs, they reduce in place. Otherwise the
// all-reduce goes through the shared region; a rank that cannot offer anything begins that at once, and waits for
// nothing.
//
// A failed rank must not be written to. Each rank announces that it is writing before every part, and writes only if no
// rank has withdrawn its tensors; a rank that gives up withdraws, and its handles end once no peer is writing. A peer
// that has stopped in the middle of a part is not awaited for long: it can only finish that part.
#include <algorithm>
#include <cstring>

#include "data/memory/memory_operation.h"

namespace sirtaki {
namespace {

constexpr int64_t steps_of_offer = 1;
constexpr Nanoseconds longest_wait_for_writers = seconds(5);

// The tensors of all members, as each member's addresses of the pieces of the buffer.
class Tensors {
 public:
  Tensors(const ScatterList& own, size_t element_bytes) : element_bytes_(element_bytes) {
    own.visit(0, own.bytes(), [&](const uint8_t*, const uint8_t*, int64_t offset, int64_t bytes) {
      begins_.push_back(offset);
      ends_.push_back(offset + bytes);
    });
  }

  size_t count() const { return begins_.size(); }

  // Adds the tensors of the next member. Returns false if its directory leads out of its section.
  bool add(uint8_t* section, int64_t section_bytes) {
    const auto* directory = reinterpret_cast<const uint64_t*>(section);
    for (size_t i = 0; i < count(); ++i) {
      // Reads it once: a hostile rank may change it between the check and the use.
      const uint64_t offset = __atomic_load_n(&directory[i], __ATOMIC_RELAXED);
      const auto most = static_cast<uint64_t>(section_bytes - (ends_[i] - begins_[i]));
      if (offset > most || offset % element_bytes_ != 0) return false;
      addresses_.push_back(section + offset);
    }
    return true;
  }

  // Calls visit(addresses by member, bytes) for each contiguous part of [begin, end) of at most `most` bytes.
  template <typename Visit>
  void visit(int64_t begin, int64_t end, int64_t most, Visit&& visit_part) {
    const size_t members = addresses_.size() / count();
    parts_.resize(members);
    auto i = static_cast<size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
    for (int64_t at = begin; at < end;) {
      const int64_t bytes = std::min({end, ends_[i], at + most}) - at;
      for (size_t member = 0; member < members; ++member)
        parts_[member] = addresses_[member * count() + i] + (at - begins_[i]);
      visit_part(parts_, bytes);
      at += bytes;
      if (at == ends_[i]) ++i;
    }
  }

 private:
  size_t element_bytes_;
  std::vector<int64_t> begins_, ends_;  // of the pieces, in the whole buffer
  std::vector<uint8_t*> addresses_;  // by member and piece
  std::vector<uint8_t*> parts_;
};

Status refuse_offer_of(int32_t rank) {
  return {SRT_PROTOCOL, format("rank %d offered a tensor outside the memory that it shares", rank), rank};
}

// The all-reduce after all ranks have offered their tensors. Each step but the last reduces one part of this rank's
// slice; the last waits until the others have finished theirs.
class InPlaceAllreduce final : public MemoryOperation {
 public:
  InPlaceAllreduce(const MemorySetting& setting, TransferPtr t, Tensors tensors)
      : MemoryOperation(setting, std::move(t), steps_of_offer), tensors_(std::move(tensors)) {
    const int64_t largest = slice_of(transfer().buffer.bytes(), member_count(), 0).bytes;
    parts_ = rounds_for(largest, chunk_bytes());
    steps = parts_ + 1;
    sources_.resize(member_count());
  }

  const char* algorithm() const override { return "in place"; }

 private:
  bool step(int64_t index) override {
    if (index == parts_) return all_past(index - 1);
    if (!local_peers().begin_writing(slots())) {  // a member has given up, or is leaving
      await_end();
      return false;
    }
    const Slice own = slice_of(transfer().buffer.bytes(), member_count(), transfer().own);
    const int64_t end = own.begin + own.bytes, begin = own.begin + index * chunk_bytes();
    if (begin < end) reduce_part(begin, std::min(begin + chunk_bytes(), end));
    local_peers().end_writing();
    return true;
  }

  // Reduces into this rank's tensors, and copies from there while the result is in the first-level cache.
  void reduce_part(int64_t begin, int64_t end) {
    constexpr int64_t in_cache = 16 << 10;
    const size_t own = transfer().own;
    tensors_.visit(begin, end, in_cache, [&](const std::vector<uint8_t*>& parts, int64_t bytes) {
      std::ranges::copy(parts, sources_.begin());
      reduce(parts[own], sources_, bytes, begin);
      begin += bytes;
      for (size_t member = 0; member < parts.size(); ++member)
        if (member != own) std::memcpy(parts[member], parts[own], static_cast<size_t>(bytes));
    });
  }

  Tensors tensors_;
  std::vector<const void*> sources_;
  int64_t parts_ = 0;
};

// The offer of a rank, and then whichever all-reduce follows from the offers of all.
class OfferedAllreduce final : public Operation {
 public:
  OfferedAllreduce(const MemorySetting& setting, TransferPtr transfer)
      : setting_(setting), transfer_(std::move(transfer)), offered_(transfer_->plan, steps_of_offer) {
    for (int32_t member : transfer_->members) slots_.push_back(setting_.local_peers.slot_of(member));
  }

  Status advance(Nanoseconds now, Progress& progress) override {
    progress = Progress::blocked;
    if (!has_offered_) {
      setting_.local_peers.offer(offered_);
      setting_.local_peers.publish(offered_, now);
      has_offered_ = true;
      progress = Progress::moved;
    }
    if (!following_) SIRTAKI_TRY(look_at_others());
    return following_ ? following_->advance(now, progress) : Status::ok();
  }

  void cancel() override {
    setting_.local_peers.withdraw();
    gives_up_ = now() + longest_wait_for_writers;
  }
  bool is_quiet() const override {
    const auto is_writing = [&](int slot) { return setting_.local_peers.is_writing(slot); };
    return std::ranges::none_of(slots_, is_writing) || now() >= gives_up_;
  }
  bool must_be_polled() const override { return gives_up_ != never; }
  std::vector<int32_t> waits_for() const override { return following_ ? following_->waits_for() : late(); }
  const char* algorithm() const override { return following_ ? following_->algorithm() : ""; }

 private:
  bool has_answered(size_t member) const {
    return setting_.local_peers.milestone_of(slots_[member]) >= offered_.value();
  }

  // Returns the members that have neither offered their tensors nor begun without.
  std::vector<int32_t> late() const {
    std::vector<int32_t> ranks;
    for (size_t member = 0; member < slots_.size(); ++member)
      if (!has_answered(member)) ranks.push_back(transfer_->members[member]);
    return ranks;
  }

  // Begins without offers as soon as one member has: others wait for this rank's data, whoever else is late.
  Status look_at_others() {
    size_t offers = 0;
    for (size_t member = 0; member < slots_.size(); ++member) {
      if (!has_answered(member)) continue;
      if (!setting_.local_peers.has_offered(slots_[member], offered_)) {
        following_ = make_staged_allreduce(setting_, transfer_, steps_of_offer);
        return Status::ok();
      }
      ++offers;
    }
    return offers == slots_.size() ? begin_in_place() : Status::ok();
  }

  Status begin_in_place() {
    const LocalPeers& peers = setting_.local_peers;
    Tensors tensors(transfer_->buffer, transfer_->element_bytes());
    for (size_t member = 0; member < slots_.size(); ++member)
      if (!tensors.add(peers.arena().section(slots_[member]), peers.arena().section_bytes()))
        return refuse_offer_of(transfer_->members[member]);
    following_ = std::make_unique<InPlaceAllreduce>(setting_, transfer_, std::move(tensors));
    return Status::ok();
  }

  MemorySetting setting_;
  TransferPtr transfer_;
  Milestone offered_;
  std::vector<int> slots_;  // by member
  bool has_offered_ = false;
  std::unique_ptr<Operation> following_;
  Nanoseconds gives_up_ = never;  // waiting for peers that write, after a failure
};

// Returns whether the ranks may offer tensors to each other: all of them answer alike.
bool may_be_in_place(const Transfer& transfer, const SharedArena& arena) {
  constexpr int64_t few_bytes = 16 << 10;  // offers take longer than they save
  return arena.exists() && transfer.phase == 0 && transfer.is_last_phase && transfer.prescale.is_one() &&
         transfer.buffer.bytes() > few_bytes && transfer.buffer.pieces() <= ArenaSection::most_listed;
}

// Lists this rank's tensors in its directory. Returns false if one of them lies elsewhere.
bool list(const Transfer& transfer, const SharedArena& arena) {
  const ArenaSection* section = arena.own();
  if (!section) return false;
  bool are_inside = true;
  const auto element = static_cast<int64_t>(transfer.element_bytes());
  uint64_t* next = section->directory();
  transfer.buffer.visit(0, transfer.buffer.bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
    const int64_t offset = section->offset_of(output, bytes);
    are_inside &= input == output && offset >= 0 && offset % element == 0;
    *next++ = static_cast<uint64_t>(offset);
  });
  return are_inside;
}

}  // namespace

std::unique_ptr<Operation> make_memory_allreduce(const MemorySetting& setting, TransferPtr transfer) {
  const SharedArena& arena = setting.local_peers.arena();
  if (!may_be_in_place(*transfer, arena)) return make_staged_allreduce(setting, std::move(transfer), 0);
  if (!list(*transfer, arena)) return make_staged_allreduce(setting, std::move(transfer), steps_of_offer);
  return std::make_unique<OfferedAllreduce>(setting, std::move(transfer));
}

}  // namespace sirtaki
