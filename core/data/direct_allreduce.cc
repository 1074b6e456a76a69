// All-reduce by pairwise exchange: each rank sends every other rank that rank's slice, sums its own slice in rank
// order (the same bits as through shared memory), and sends the result to all. These are the two phases of Thakur,
// Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), with all pairs at once.
#include <algorithm>

#include "data/link_operation.h"

namespace sirtaki {
namespace {

class DirectAllreduce final : public LinkOperation {
 public:
  DirectAllreduce(const LinkSetting& setting, TransferPtr t) : LinkOperation(setting, std::move(t)) {
    round_bytes_ = chunk_bytes() * static_cast<int64_t>(member_count());
    rounds_ = (transfer().buffer.bytes() + round_bytes_ - 1) / round_bytes_;
    steps = rounds_ ? 4 * (rounds_ + 2) : 0;
    bodies_.resize(member_count());
    got_.resize(member_count());
  }

 private:
  // Runs one of four steps per round, staggered so that a round's slices are in transit while those of the previous
  // round are reduced: send the slices of round i, reduce round i - 1, send its result, receive the results of round
  // i - 2.
  Status step(int64_t index, bool& finished) override {
    const int64_t i = index / 4;
    switch (index % 4) {
      case 0: finished = send_slices(i); return Status::ok();
      case 1: return reduce_own(i - 1, finished);
      case 2: finished = send_result(i - 1); return Status::ok();
      default: return collect(i - 2, finished);
    }
  }

  bool is_round(int64_t round) const { return round >= 0 && round < rounds_; }

  // Returns a member's slice of a round, relative to the whole buffer.
  Slice slice(size_t member, int64_t round) const {
    const int64_t begin = round * round_bytes_;
    const Slice part = slice_of(std::min(round_bytes_, transfer().buffer.bytes() - begin), member_count(), member);
    return {begin + part.begin, part.bytes};
  }

  bool send_slices(int64_t round) {
    if (!is_round(round)) return true;
    if (!all_have_room()) return false;
    for (size_t member = 0; member < member_count(); ++member) {
      if (member == transfer().own) continue;
      const Slice part = slice(member, round);
      send_inputs(member, 2 * round, transfer().buffer, part.begin, part.begin + part.bytes);
    }
    return true;
  }

  Status reduce_own(int64_t round, bool& finished) {
    finished = !is_round(round);
    if (finished) return Status::ok();
    const Slice part = slice(transfer().own, round);
    bool all_here = true;
    for (size_t member = 0; member < member_count(); ++member) {
      if (member == transfer().own) continue;
      std::span<const uint8_t> body;
      SIRTAKI_TRY(arrived(member, 2 * round, part.bytes, body));
      bodies_[member] = body.data();
      if (!body.data()) all_here = false;
    }
    if (!all_here) return Status::ok();
    reduce(bodies_, transfer().buffer, part.begin, part.begin + part.bytes, scratch_);
    for (size_t member = 0; member < member_count(); ++member)
      if (member != transfer().own) consume(member);
    finished = true;
    return Status::ok();
  }

  bool send_result(int64_t round) {
    if (!is_round(round)) return true;
    if (!all_have_room()) return false;
    const Slice part = slice(transfer().own, round);
    for (size_t member = 0; member < member_count(); ++member)
      if (member != transfer().own)
        send_results(member, 2 * round + 1, transfer().buffer, part.begin, part.begin + part.bytes, scratch_.data());
    return true;
  }

  Status collect(int64_t round, bool& finished) {
    finished = true;
    if (!is_round(round)) return Status::ok();
    for (size_t member = 0; member < member_count(); ++member) {
      if (member == transfer().own || got_[member] > round) continue;
      const Slice part = slice(member, round);
      bool is_here = false;
      SIRTAKI_TRY(take(member, 2 * round + 1, transfer().buffer, part.begin, part.begin + part.bytes, is_here));
      finished &= is_here;
      if (!is_here) continue;
      got_[member] = round + 1;
    }
    return Status::ok();
  }

  int64_t round_bytes_ = 0, rounds_ = 0;
  std::vector<const uint8_t*> bodies_;  // by member
  std::vector<int64_t> got_;            // by member: rounds whose result has arrived
  std::vector<uint8_t> scratch_;        // for this rank's slice, if it has no contiguous output
};

}  // namespace

std::unique_ptr<Operation> make_direct_allreduce(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<DirectAllreduce>(setting, std::move(transfer));
}

}  // namespace sirtaki
