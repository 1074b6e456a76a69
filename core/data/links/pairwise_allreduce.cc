#include "data/links/pairwise_allreduce.h"

#include <algorithm>

namespace sirtaki {

PairwiseAllreduce::PairwiseAllreduce(const LinkSetting& setting, TransferPtr t, int64_t bytes_each)
    : LinkOperation(setting, std::move(t)), round_bytes_(bytes_each * static_cast<int64_t>(member_count())) {
  rounds_ = (transfer().buffer.bytes() + round_bytes_ - 1) / round_bytes_;
  steps = rounds_ ? 4 * (rounds_ + 2) : 0;
  got_.resize(member_count());
}

// Runs one of four steps per round, staggered so that a round's slices are in transit while those of the previous round
// are reduced: send the slices of round i, reduce round i - 1, send its result, receive the results of round i - 2.
Status PairwiseAllreduce::step(int64_t index, bool& finished) {
  const int64_t i = index / 4;
  switch (index % 4) {
    case 0: finished = send_slices_of(i); return Status::ok();
    case 1: return reduce_own_of(i - 1, finished);
    case 2: finished = send_result_of(i - 1); return Status::ok();
    default: return take_results_of(i - 2, finished);
  }
}

PairwiseAllreduce::Part PairwiseAllreduce::part_of(size_t member, int64_t round) const {
  const int64_t first = border(round * round_bytes_);
  const int64_t last = border(std::min((round + 1) * round_bytes_, transfer().buffer.bytes()));
  const Slice slice = slice_of(last - first, member_count(), member);
  return {border(first + slice.begin), border(first + slice.begin + slice.bytes)};
}

bool PairwiseAllreduce::send_slices_of(int64_t round) {
  if (!is_round(round)) return true;
  if (!all_have_room()) return false;
  for (size_t member = 0; member < member_count(); ++member)
    if (member != transfer().own) send_slice(member, 2 * round, part_of(member, round));
  return true;
}

Status PairwiseAllreduce::reduce_own_of(int64_t round, bool& finished) {
  finished = !is_round(round);
  if (finished) return Status::ok();
  const Part part = part_of(transfer().own, round);
  SIRTAKI_TRY(all_arrived(2 * round, wire_bytes(part), bodies_, finished));
  if (!finished) return Status::ok();
  reduce_slice(bodies_, part);
  consume_all();
  return Status::ok();
}

bool PairwiseAllreduce::send_result_of(int64_t round) {
  if (!is_round(round)) return true;
  if (!all_have_room()) return false;
  const Part part = part_of(transfer().own, round);
  for (size_t member = 0; member < member_count(); ++member)
    if (member != transfer().own) send_result(member, 2 * round + 1, part);
  return true;
}

Status PairwiseAllreduce::take_results_of(int64_t round, bool& finished) {
  finished = true;
  if (!is_round(round)) return Status::ok();
  for (size_t member = 0; member < member_count(); ++member) {
    if (member == transfer().own || got_[member] > round) continue;
    bool is_here = false;
    SIRTAKI_TRY(take_result(member, 2 * round + 1, part_of(member, round), is_here));
    if (is_here) got_[member] = round + 1;
    else finished = false;
  }
  return Status::ok();
}

}  // namespace sirtaki
