// The collectives that do not reduce, through chunks of shared memory.
#include <algorithm>

#include "data/memory/memory_operation.h"
#include "data/memory/streams.h"

namespace sirtaki {
namespace {

// A broadcast. The root fills its slots, at most slots_each rounds ahead of the slowest reader. A tensor smaller than
// a few chunks is cut as well, so that the first part is read while the next one is written.
class MemoryBroadcast final : public MemoryOperation {
 public:
  MemoryBroadcast(const MemorySetting& setting, TransferPtr t, int64_t earlier_steps)
      : MemoryOperation(setting, std::move(t), earlier_steps) {
    constexpr int64_t least = 16 << 10;
    const int64_t half = (transfer().buffer.bytes() / SharedRegion::slots_each + 63) / 64 * 64;
    each_ = std::min(chunk_bytes(), std::max(half, least));
    rounds = rounds_for(transfer().buffer.bytes(), each_);
    steps = rounds;
  }

 private:
  bool step(int64_t round) override {
    const bool is_root = transfer().own == transfer().root;
    if (is_root ? !may_write(round) : !is_past(transfer().root, round)) return false;
    const int64_t begin = round * each_, end = std::min(begin + each_, transfer().buffer.bytes());
    if (is_root) {
      pack_chunk(transfer().buffer, begin, end, round);
      lend(round, round);
      copy_own(transfer().buffer, begin, end);
    } else {
      unpack(transfer().buffer, begin, end, chunk(transfer().root, round));
    }
    return true;
  }

  int64_t each_ = 0;  // bytes per round
};

// All-gather and all-to-all. In each round every member packs the next chunk of its stream, and copies its part of
// every other member's chunk: step 2r packs round r, step 2r + 1 copies it.
class MemoryExchange final : public MemoryOperation {
 public:
  MemoryExchange(const MemorySetting& setting, TransferPtr t, int64_t earlier_steps)
      : MemoryOperation(setting, std::move(t), earlier_steps), streams_(transfer()) {
    rounds = std::max<int64_t>(1, rounds_for(streams_.longest, chunk_bytes()));
    steps = 2 * rounds;
  }

 private:
  bool step(int64_t index) override {
    const int64_t round = index / 2;
    if (index % 2 == 1) return take_round(round, index);
    if (!may_write(round)) return false;
    const ScatterList& stream = streams_.own;
    pack_chunk(stream, round * chunk_bytes(), std::min((round + 1) * chunk_bytes(), stream.bytes()), round);
    lend(round, index + 1);
    return true;
  }

  bool take_round(int64_t round, int64_t index) {
    if (!all_past(index - 1)) return false;
    for (size_t member = 0; member < member_count(); ++member)
      if (member != transfer().own) take(member, round);
    const ScatterList& own = transfer().incoming[transfer().own];
    const int64_t end = round == rounds - 1 ? own.bytes() : std::min(own.bytes(), (round + 1) * chunk_bytes());
    copy_own(own, std::min(own.bytes(), round * chunk_bytes()), end);
    return true;
  }

  void take(size_t member, int64_t round) {
    const Slice& part = streams_.wanted[member];
    const int64_t first = round * chunk_bytes();
    const int64_t begin = std::max(part.begin, first), end = std::min(part.begin + part.bytes, first + chunk_bytes());
    if (begin < end)
      unpack(transfer().incoming[member], begin - part.begin, end - part.begin, chunk(member, round) + (begin - first));
  }

  Streams streams_;
};

}  // namespace

std::unique_ptr<Operation> make_staged_mover(const MemorySetting& setting, TransferPtr transfer,
                                             int64_t earlier_steps) {
  if (transfer->kind == Kind::broadcast)
    return std::make_unique<MemoryBroadcast>(setting, std::move(transfer), earlier_steps);
  return std::make_unique<MemoryExchange>(setting, std::move(transfer), earlier_steps);
}

}  // namespace sirtaki
