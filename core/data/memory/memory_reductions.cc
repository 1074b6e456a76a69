// The reductions through shared memory. Each is a sequence of steps, after each of which the milestone is published.
// The slot of a chunk follows from plan and round, so no message is needed to agree on it.
#include <algorithm>

#include "data/memory/memory_operation.h"

namespace sirtaki {
namespace {

// An all-reduce in which every rank reduces the whole buffer. In each round all ranks copy their chunk in, and then
// sum all chunks into the user's memory. That is two passes over memory, the minimum for two ranks, and one wait less
// than with slices, which is faster for more ranks too as long as the chunks of all are few bytes. Step 2r packs round
// r, step 2r + 1 reduces it.
class WholeAllreduce final : public MemoryOperation {
 public:
  WholeAllreduce(const MemorySetting& setting, TransferPtr t, int64_t earlier_steps)
      : MemoryOperation(setting, std::move(t), earlier_steps) {
    rounds = rounds_for(transfer().buffer.bytes(), chunk_bytes());
    steps = 2 * rounds;
    sources_.resize(member_count());
  }

  static bool suits(const Transfer& transfer) {
    constexpr int64_t few_bytes = 64 << 10;  // to read them takes a core a few µs, about as long as a wait for all
    const auto members = static_cast<int64_t>(transfer.members.size());
    return members == 2 || members * transfer.buffer.bytes() <= few_bytes;
  }

  const char* algorithm() const override { return "whole"; }

 private:
  bool reduces_all() const override { return true; }

  bool step(int64_t index) override {
    const int64_t round = index / 2, begin = round * chunk_bytes();
    const int64_t end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    if (index % 2 == 0) {
      if (!may_write(round)) return false;
      pack_chunk(transfer().buffer, begin, end, round);
      lend(round, index + 1);
      return true;
    }
    if (!all_past(index - 1)) return false;
    reduce_round(begin, end, round);
    return true;
  }

  void reduce_round(int64_t begin, int64_t end, int64_t round) {
    const bool raw = transfer().prescale.is_one();
    transfer().buffer.visit(begin, end, [&](const uint8_t* input, uint8_t* output, int64_t offset, int64_t bytes) {
      if (!output) return;
      for (size_t member = 0; member < member_count(); ++member) sources_[member] = chunk(member, round) + offset;
      // This rank's chunk contains its prescaled input, rounded exactly as for the other ranks.
      if (raw && input) sources_[transfer().own] = input;
      reduce(output, sources_, bytes, begin + offset);
    });
  }

  std::vector<const void*> sources_;
};

// An all-reduce for more ranks and bytes. The chunk of a round is cut into one slice per member. Every rank packs its
// whole chunk, reduces its own slice of all chunks in rank order, and copies the other members' slices. A round is
// packed before the previous one is copied, so that a rank has work while others reduce.
class SlicedAllreduce final : public MemoryOperation {
 public:
  SlicedAllreduce(const MemorySetting& setting, TransferPtr t, int64_t earlier_steps)
      : MemoryOperation(setting, std::move(t), earlier_steps) {
    rounds = rounds_for(transfer().buffer.bytes(), chunk_bytes());
    steps = 3 * rounds + 2;
    sources_.resize(member_count());
  }

  const char* algorithm() const override { return "sliced"; }

 private:
  // Packs round r in step 3r, copies round r - 1 in step 3r + 1, reduces round r in step 3r + 2; the last pack and
  // reduce steps are empty.
  bool step(int64_t index) override {
    const int64_t round = index / 3;
    switch (index % 3) {
      case 0: return pack_round(round, index);
      case 1: return copy_round(round - 1, index);
      default: return reduce_round(round, index);
    }
  }

  bool is_round(int64_t round) const { return round >= 0 && round * chunk_bytes() < transfer().buffer.bytes(); }

  bool pack_round(int64_t round, int64_t index) {
    if (!is_round(round)) return true;
    if (!may_write(round)) return false;
    const int64_t begin = round * chunk_bytes(), end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    pack_chunk(transfer().buffer, begin, end, round);
    lend(round, index + 4);  // the step that copies this round
    return true;
  }

  bool reduce_round(int64_t round, int64_t index) {
    if (!is_round(round)) return true;
    if (!all_past(index - 2)) return false;
    const Slice part = slice(transfer().own, round);
    for (size_t member = 0; member < member_count(); ++member) sources_[member] = chunk(member, round) + part.begin;
    // Reduces into this rank's own slot, whose slice no other rank reads before it is reduced.
    uint8_t* reduced = chunk(transfer().own, round) + part.begin;
    reduce(reduced, sources_, part.bytes, round * chunk_bytes() + part.begin);
    unpack_slice(part, transfer().own, round);
    return true;
  }

  bool copy_round(int64_t round, int64_t index) {
    if (!is_round(round)) return true;
    if (!all_past(index - 2)) return false;  // the step that reduced this round
    for (size_t member = 0; member < member_count(); ++member) {
      if (member != transfer().own) unpack_slice(slice(member, round), member, round);
    }
    return true;
  }

  // Returns a member's slice of a round's chunk.
  Slice slice(size_t member, int64_t round) const {
    return slice_of(std::min(chunk_bytes(), transfer().buffer.bytes() - round * chunk_bytes()), member_count(), member);
  }

  void unpack_slice(Slice part, size_t member, int64_t round) const {
    const int64_t begin = round * chunk_bytes() + part.begin;
    unpack(transfer().buffer, begin, begin + part.bytes, chunk(member, round) + part.begin);
  }

  std::vector<const void*> sources_;
};

// A reduce-scatter. The chunk of a round contains a share for each member: every rank packs the others' shares, and
// then sums its own share of all chunks directly into its output. Step 2r packs round r, step 2r + 1 reduces it.
class MemoryReducescatter final : public MemoryOperation {
 public:
  MemoryReducescatter(const MemorySetting& setting, TransferPtr t) : MemoryOperation(setting, std::move(t)) {
    share_ = chunk_bytes() / static_cast<int64_t>(member_count()) / 64 * 64;
    int64_t most = 0;
    for (const ScatterList& part : transfer().outgoing) most = std::max(most, part.bytes());
    rounds = rounds_for(most, share_);
    steps = 2 * rounds;
    sources_.resize(member_count());
    const ScatterList& own = transfer().outgoing[transfer().own];
    is_read_in_place_ = transfer().prescale.is_one();
    own.visit(0, own.bytes(),
              [&](const uint8_t* input, const uint8_t*, int64_t, int64_t) { is_read_in_place_ &= input != nullptr; });
  }

 private:
  bool step(int64_t index) override {
    const int64_t round = index / 2;
    if (index % 2 == 1) return reduce_round(round, index);
    if (!may_write(round)) return false;
    for (size_t member = 0; member < member_count(); ++member) {
      const auto [begin, end] = range(member, round);
      if (begin < end && !(is_read_in_place_ && member == transfer().own))
        pack_chunk(transfer().outgoing[member], begin, end, round, place_of(member));
    }
    lend(round, index + 1);
    return true;
  }

  bool reduce_round(int64_t round, int64_t index) {
    if (!all_past(index - 1)) return false;
    const size_t own = transfer().own;
    const auto [begin, end] = range(own, round);
    transfer().outgoing[own].visit(
        begin, end, [&, begin = begin](const uint8_t* input, uint8_t* output, int64_t offset, int64_t bytes) {
      if (!output) return;
      for (size_t member = 0; member < member_count(); ++member)
        sources_[member] = chunk(member, round) + place_of(own) + offset;
      if (is_read_in_place_) sources_[own] = input;
      reduce(output, sources_, bytes, begin + offset);
    });
    return true;
  }

  int64_t place_of(size_t member) const { return share_ * static_cast<int64_t>(member); }

  std::pair<int64_t, int64_t> range(size_t member, int64_t round) const {
    const int64_t bytes = transfer().outgoing[member].bytes();
    return {std::min(bytes, round * share_), std::min(bytes, (round + 1) * share_)};
  }

  int64_t share_ = 0;
  bool is_read_in_place_ = false;      // this rank's own input; a joined rank has none
  std::vector<const void*> sources_;
};

}  // namespace

std::unique_ptr<Operation> make_staged_allreduce(const MemorySetting& setting, TransferPtr transfer,
                                                 int64_t earlier_steps) {
  if (WholeAllreduce::suits(*transfer))
    return std::make_unique<WholeAllreduce>(setting, std::move(transfer), earlier_steps);
  return std::make_unique<SlicedAllreduce>(setting, std::move(transfer), earlier_steps);
}

std::unique_ptr<Operation> make_memory_reducescatter(const MemorySetting& setting, TransferPtr transfer) {
  return std::make_unique<MemoryReducescatter>(setting, std::move(transfer));
}

}  // namespace sirtaki
