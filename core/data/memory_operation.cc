#include "data/memory_operation.h"

namespace sirtaki {
namespace {

constexpr int steps_a_call = 8;  // then negotiation has its turn

}  // namespace

MemoryOperation::MemoryOperation(Neighbours& neighbours, SlotState& state, const Kernels& kernels,
                                 std::shared_ptr<const Transfer> transfer)
    : neighbours_(neighbours), state_(state), kernels_(kernels), arithmetic_(kernels.of(transfer->dtype)),
      transfer_(std::move(transfer)) {
  slots_.reserve(transfer_->members.size());
  for (int32_t member : transfer_->members) slots_.push_back(neighbours_.slot_of(member));
}

Status MemoryOperation::advance(Nanoseconds now, Progress& progress) {
  progress = Progress::blocked;
  for (int budget = steps_a_call; budget > 0 && next_ < steps; --budget) {
    const Nanoseconds start = measures() ? sirtaki::now() : 0;
    if (!step(next_)) break;
    if (measures()) transfer_->times->working += sirtaki::now() - start;
    ++next_;
    const auto done = static_cast<uint64_t>(next_);
    neighbours_.publish({transfer_->plan, next_ == steps ? Milestone::last_step : done}, now);
    progress = Progress::moved;
  }
  if (next_ == steps) progress = Progress::done;
  return Status::ok();
}

std::vector<int32_t> MemoryOperation::waits_for() const {
  std::vector<int32_t> late;
  for (size_t member = 0; member < slots_.size(); ++member)
    if (member != transfer_->own && neighbours_.milestone_of(slots_[member]) < awaited_)
      late.push_back(transfer_->members[member]);
  return late;
}

bool MemoryOperation::is_past(size_t member, int64_t index) {
  awaited_ = Milestone(transfer_->plan, static_cast<uint64_t>(index) + 1).value();
  return neighbours_.milestone_of(slots_[member]) >= awaited_;
}

bool MemoryOperation::all_past(int64_t index) {
  for (size_t member = 0; member < slots_.size(); ++member)
    if (member != transfer_->own && !is_past(member, index)) return false;
  return true;
}

bool MemoryOperation::may_write(int64_t round) {
  Lease& lease = state_.leases[turn(round) % SharedRegion::slots_each];
  awaited_ = lease.until;
  for (int reader : lease.readers)
    if (neighbours_.milestone_of(reader) < lease.until) return false;
  lease.readers.clear();
  return true;
}

void MemoryOperation::lend(int64_t round, int64_t until_past_index) {
  Lease& lease = state_.leases[turn(round) % SharedRegion::slots_each];
  lease.until = Milestone(transfer_->plan, static_cast<uint64_t>(until_past_index) + 1).value();
  lease.readers.clear();
  for (size_t member = 0; member < slots_.size(); ++member)
    if (member != transfer_->own) lease.readers.push_back(slots_[member]);
}

void MemoryOperation::pack_chunk(int64_t begin, int64_t end, int64_t round) {
  uint8_t* to = chunk(transfer_->own, round);
  const bool streams = state_.distance.streams(end - begin);
  if (streams && !measures()) return pack(*transfer_, kernels_, begin, end, to, kernels_.stream);
  const Nanoseconds start = now();
  pack(*transfer_, kernels_, begin, end, to, streams ? kernels_.stream : copy_plainly);
  const Nanoseconds took = now() - start;
  if (!streams) state_.distance.noted(end - begin, took);
  if (measures()) transfer_->times->packing += took;
}

}  // namespace sirtaki
