// The collectives through shared memory. Each is a sequence of steps with a publication after every step; the
// slot of a chunk is chosen by plan and round, so that all members know it without being told.
#include <algorithm>
#include <cstring>

#include "data/memory_operation.h"

namespace sirtaki {
namespace {

int64_t rounds_for(int64_t bytes, int64_t chunk) { return (bytes + chunk - 1) / chunk; }

// Everyone reduces everything. In each round all copy their chunk in, and then add the others' to their own on the way
// into the user's memory: two passes, the least that is possible for two ranks; and one wait less than with slices,
// which counts for more ranks as long as there are few bytes. Step 2r packs round r, step 2r + 1 reduces it.
class WholeAllreduce final : public MemoryOperation {
 public:
  WholeAllreduce(Neighbours& n, SlotState& l, const Kernels& k, std::shared_ptr<const Transfer> t)
      : MemoryOperation(n, l, k, std::move(t)) {
    rounds = rounds_for(transfer().buffer.bytes(), chunk_bytes());
    steps = 2 * rounds;
    sources_.resize(member_count());
  }

  static bool suits(const Transfer& transfer) {
    constexpr int64_t few_bytes = 16 << 10;
    return transfer.members.size() == 2 || transfer.buffer.bytes() <= few_bytes;
  }

 private:
  bool step(int64_t index) override {
    const int64_t round = index / 2, begin = round * chunk_bytes();
    const int64_t end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    if (index % 2 == 0) {
      if (!may_write(round)) return false;
      pack_chunk(begin, end, round);
      lend(round, index + 1);
      return true;
    }
    if (!all_past(index - 1)) return false;
    reduce(begin, end, round);
    return true;
  }

  void reduce(int64_t begin, int64_t end, int64_t round) {
    const auto kernel = arithmetic().reduce[static_cast<int>(transfer().reduce_op)];
    const size_t element = transfer().element_bytes();
    const bool raw = transfer().prescale.is_one();
    transfer().buffer.visit(begin, end, [&](const uint8_t* input, uint8_t* output, int64_t offset, int64_t bytes) {
      if (!output) return;
      for (size_t member = 0; member < member_count(); ++member) sources_[member] = chunk(member, round) + offset;
      // The own chunk holds what a prescale has made of the input, rounded exactly as the others see it.
      if (raw && input) sources_[transfer().own] = input;
      kernel(output, sources_.data(), static_cast<int>(member_count()), static_cast<size_t>(bytes) / element,
             transfer().postscale);
    });
  }

  std::vector<const void*> sources_;
};

// More ranks and bytes. A round's chunk is cut into one slice a member. Everyone packs its whole chunk, reduces its own
// slice of all chunks in rank order, and copies the other members' slices. Packing a round comes before copying the
// round before it, so that a rank has something to do while others reduce.
class SlicedAllreduce final : public MemoryOperation {
 public:
  SlicedAllreduce(Neighbours& n, SlotState& l, const Kernels& k, std::shared_ptr<const Transfer> t)
      : MemoryOperation(n, l, k, std::move(t)) {
    rounds = rounds_for(transfer().buffer.bytes(), chunk_bytes());
    steps = 3 * rounds + 2;
    sources_.resize(member_count());
  }

 private:
  // Step 3r packs round r, 3r + 1 copies round r - 1, 3r + 2 reduces round r; the last pack and reduce are empty.
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
    pack_chunk(begin, end, round);
    lend(round, index + 4);  // the step that copies this round
    return true;
  }

  bool reduce_round(int64_t round, int64_t index) {
    if (!is_round(round)) return true;
    if (!all_past(index - 2)) return false;
    const Slice part = slice(transfer().own, round);
    const auto kernel = arithmetic().reduce[static_cast<int>(transfer().reduce_op)];
    for (size_t member = 0; member < member_count(); ++member) sources_[member] = chunk(member, round) + part.begin;
    // Into this rank's own slot: nobody else reads that slice of it before it is reduced.
    uint8_t* reduced = chunk(transfer().own, round) + part.begin;
    kernel(reduced, sources_.data(), static_cast<int>(member_count()),
           static_cast<size_t>(part.bytes) / transfer().element_bytes(), transfer().postscale);
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

  // Of a round's chunk.
  Slice slice(size_t member, int64_t round) const {
    return slice_of(std::min(chunk_bytes(), transfer().buffer.bytes() - round * chunk_bytes()), member_count(), member);
  }

  void unpack_slice(Slice part, size_t member, int64_t round) const {
    const int64_t begin = round * chunk_bytes() + part.begin;
    unpack(transfer().buffer, begin, begin + part.bytes, chunk(member, round) + part.begin);
  }

  std::vector<const void*> sources_;
};

// The root fills its slots, at most slots_each rounds ahead of the slowest reader.
class MemoryBroadcast final : public MemoryOperation {
 public:
  MemoryBroadcast(Neighbours& n, SlotState& l, const Kernels& k, std::shared_ptr<const Transfer> t)
      : MemoryOperation(n, l, k, std::move(t)) {
    rounds = rounds_for(transfer().buffer.bytes(), chunk_bytes());
    steps = rounds;
  }

 private:
  bool step(int64_t round) override {
    const bool is_root = transfer().own == transfer().root;
    if (is_root ? !may_write(round) : !is_past(transfer().root, round)) return false;
    const int64_t begin = round * chunk_bytes(), end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    uint8_t* shared = chunk(transfer().root, round);
    transfer().buffer.visit(begin, end, [&](const uint8_t* input, uint8_t* output, int64_t offset, int64_t bytes) {
      const auto count = static_cast<size_t>(bytes);
      if (is_root) {
        std::memcpy(shared + offset, input, count);
        if (output && output != input) std::memcpy(output, input, count);
      } else if (output) {
        std::memcpy(output, shared + offset, count);
      }
    });
    if (is_root) lend(round, round);
    return true;
  }
};

// In each round every member packs its next chunk, and copies everyone's: step 2r packs round r, 2r + 1 copies it.
class MemoryAllgather final : public MemoryOperation {
 public:
  MemoryAllgather(Neighbours& n, SlotState& l, const Kernels& k, std::shared_ptr<const Transfer> t)
      : MemoryOperation(n, l, k, std::move(t)) {
    int64_t most = 0;
    for (const ScatterList& part : transfer().gathered) most = std::max(most, part.bytes());
    rounds = rounds_for(most, chunk_bytes());
    steps = 2 * rounds;
  }

 private:
  bool step(int64_t index) override {
    const int64_t round = index / 2;
    if (index % 2 == 1) return copy_round(round, index);
    if (!may_write(round)) return false;
    const int64_t begin = round * chunk_bytes(), end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    pack_chunk(begin, end, round);
    lend(round, index + 1);
    return true;
  }

  bool copy_round(int64_t round, int64_t index) {
    if (!all_past(index - 1)) return false;
    for (size_t member = 0; member < member_count(); ++member) {
      const ScatterList& part = transfer().gathered[member];
      const int64_t begin = round * chunk_bytes(), end = std::min(begin + chunk_bytes(), part.bytes());
      unpack(part, begin, end, chunk(member, round));
    }
    return true;
  }
};

}  // namespace

MemoryBackend::MemoryBackend(Neighbours& neighbours, const Kernels& kernels)
    : neighbours_(neighbours), kernels_(kernels) {}

bool MemoryBackend::serves(const Transfer& transfer) const {
  return transfer.device < 0 && std::all_of(transfer.members.begin(), transfer.members.end(),
                                            [&](int32_t rank) { return neighbours_.slot_of(rank) >= 0; });
}

std::unique_ptr<Operation> MemoryBackend::start(std::shared_ptr<const Transfer> transfer) {
  switch (transfer->kind) {
    case Kind::allreduce:
      if (WholeAllreduce::suits(*transfer))
        return std::make_unique<WholeAllreduce>(neighbours_, state_, kernels_, std::move(transfer));
      return std::make_unique<SlicedAllreduce>(neighbours_, state_, kernels_, std::move(transfer));
    case Kind::broadcast: return std::make_unique<MemoryBroadcast>(neighbours_, state_, kernels_, std::move(transfer));
    case Kind::allgather: return std::make_unique<MemoryAllgather>(neighbours_, state_, kernels_, std::move(transfer));
    default: return nullptr;  // a barrier is over once it is decided
  }
}

}  // namespace sirtaki
