#include "data/memory/memory_operation.h"

#include <algorithm>
#include <cmath>

#include "data/adasum.h"

namespace sirtaki {
namespace {

constexpr int64_t steps_a_phase = 1 << 20;

}  // namespace

MemoryOperation::MemoryOperation(const MemorySetting& setting, TransferPtr transfer, int64_t earlier_steps)
    : setting_(setting), arithmetic_(setting.kernels.of(transfer->dtype)), transfer_(std::move(transfer)),
      chunk_bytes_(setting_.local_peers.region().chunk_bytes_for(transfer_->chunk_bytes)),
      earlier_steps_(earlier_steps) {
  slots_.reserve(transfer_->members.size());
  for (int32_t member : transfer_->members) slots_.push_back(setting_.local_peers.slot_of(member));
}

Milestone MemoryOperation::after(int64_t done) const {
  return {transfer_->plan, static_cast<uint64_t>(transfer_->phase * steps_a_phase + earlier_steps_ + done)};
}

Status MemoryOperation::advance(Nanoseconds now, Progress& progress) {
  progress = Progress::blocked;
  for (int budget = steps_a_call; budget > 0 && next_ < steps; --budget) {
    const Nanoseconds start = measures() ? sirtaki::now() : 0;
    if (!step(next_)) break;
    if (measures()) transfer_->times->working += sirtaki::now() - start;
    const bool is_published = is_awaited(next_++);
    const bool ends = next_ == steps && transfer_->is_last_phase && !is_followed;
    if (is_published)
      setting_.local_peers.publish(ends ? Milestone(transfer_->plan, Milestone::last_step) : after(next_), now);
    progress = Progress::moved;
  }
  if (next_ == steps) progress = Progress::done;
  return Status::ok();
}

std::vector<int32_t> MemoryOperation::waits_for() const {
  std::vector<int32_t> late;
  for (size_t member = 0; member < slots_.size(); ++member)
    if (member != transfer_->own && setting_.local_peers.milestone_of(slots_[member]) < awaited_)
      late.push_back(transfer_->members[member]);
  return late;
}

bool MemoryOperation::is_past(size_t member, int64_t index) {
  awaited_ = after(index + 1).value();
  return setting_.local_peers.milestone_of(slots_[member]) >= awaited_;
}

bool MemoryOperation::all_past(int64_t index) {
  for (size_t member = 0; member < slots_.size(); ++member)
    if (member != transfer_->own && !is_past(member, index)) return false;
  return true;
}

bool MemoryOperation::may_write(int64_t round) {
  Lease& lease = setting_.state.leases[turn(round) % SharedRegion::slots_each];
  awaited_ = lease.until;
  for (int reader : lease.readers)
    if (setting_.local_peers.milestone_of(reader) < lease.until) return false;
  lease.readers.clear();
  return true;
}

void MemoryOperation::lend(int64_t round, int64_t until_past_index) {
  Lease& lease = setting_.state.leases[turn(round) % SharedRegion::slots_each];
  lease.until = after(until_past_index + 1).value();
  lease.readers.clear();
  for (size_t member = 0; member < slots_.size(); ++member)
    if (member != transfer_->own) lease.readers.push_back(slots_[member]);
}

void MemoryOperation::reduce(uint8_t* out, const std::vector<const void*>& sources, int64_t bytes,
                             int64_t position) const {
  const auto kernel = arithmetic_->reduce[static_cast<int>(transfer_->reduce_op)];
  const size_t elements = static_cast<size_t>(bytes) / transfer_->element_bytes();
  const bool is_finite = kernel(out, sources.data(), static_cast<int>(member_count()), elements, transfer_->postscale);
  NotFinite* first = transfer_->not_finite;
  if (!is_finite && first && !first->is_there) *first = find_not_finite(out, sources, elements, position);
}

// The result may have replaced this rank's own value. That one is to blame if no other rank's is an infinity or a NaN,
// nor are all the others so large that twice their sum is.
NotFinite MemoryOperation::find_not_finite(const uint8_t* out, const std::vector<const void*>& sources, size_t elements,
                                           int64_t position) const {
  const size_t size = transfer_->element_bytes();
  size_t index = 0;
  while (index + 1 < elements && arithmetic_->are_finite(out + index * size, 1)) ++index;
  double value = std::nan("");
  if (arithmetic_->to_double) arithmetic_->to_double(&value, out + index * size, 1);
  NotFinite found{true, std::isnan(value), reduces_all(), -1, position + static_cast<int64_t>(index * size)};
  std::vector<const void*> others;
  for (size_t member = 0; member < member_count(); ++member) {
    const uint8_t* theirs = static_cast<const uint8_t*>(sources[member]) + index * size;
    if (theirs == out + index * size) continue;
    if (!arithmetic_->are_finite(theirs, 1)) {
      found.rank = transfer_->members[member];
      return found;
    }
    others.insert(others.end(), 2, theirs);
  }
  uint8_t twice[16];  // the largest element
  const auto kernel = arithmetic_->reduce[static_cast<int>(transfer_->reduce_op)];
  if (kernel(twice, others.data(), static_cast<int>(others.size()), 1, {}))
    found.rank = transfer_->members[transfer_->own];
  return found;
}

void MemoryOperation::pack_chunk(const ScatterList& list, int64_t begin, int64_t end, int64_t round, int64_t offset) {
  if (begin >= end) return;
  uint8_t* to = chunk(transfer_->own, round) + offset;
  StreamingStorePolicy& streaming_stores = setting_.state.streaming_stores;
  const bool streams = streaming_stores.streams(end - begin);
  const Packing packing{*transfer_, setting_.kernels, streams ? setting_.kernels.stream : copy_plainly};
  if (streams && !measures()) return packing.pack(list, begin, end, to);
  const Nanoseconds start = now();
  packing.pack(list, begin, end, to);
  const Nanoseconds took = now() - start;
  if (!streams) streaming_stores.noted(end - begin, took);
  if (measures()) transfer_->times->packing += took;
}

MemoryBackend::MemoryBackend(LocalPeers& local_peers, const Kernels& kernels)
    : local_peers_(local_peers), kernels_(kernels) {}

bool MemoryBackend::serves(const Transfer& transfer) const {
  return transfer.device < 0 && std::all_of(transfer.members.begin(), transfer.members.end(),
                                            [&](int32_t rank) { return local_peers_.slot_of(rank) >= 0; });
}

std::unique_ptr<Operation> MemoryBackend::start(TransferPtr transfer) {
  const MemorySetting setting{local_peers_, state_, kernels_};
  switch (transfer->kind) {
    case Kind::allreduce:
      if (transfer->reduce_op == ReduceOp::adasum) return make_adasum(*this, kernels_, std::move(transfer));
      return make_memory_allreduce(setting, std::move(transfer));
    case Kind::reducescatter: return make_memory_reducescatter(setting, std::move(transfer));
    case Kind::broadcast:
    case Kind::allgather:
    case Kind::alltoall: return make_memory_mover(setting, std::move(transfer));
    default: return nullptr;  // a barrier is complete once it is decided
  }
}

}  // namespace sirtaki
