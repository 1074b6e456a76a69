// Broadcast, all-gather and all-to-all between ranks that may read each other's memory (peer_memory.h): every byte is
// copied once, from one rank's tensor to another's.
//
// A rank lists the addresses of its data in a chunk. The others read the data, and publish a milestone. The operation
// ends when all have, because then its tensors may change. If a rank could not read something, the owner and whoever
// sees it repeat the operation through the chunks: the system may forbid such reads, or the memory may be a device's.
// That rank lists nothing from then on, and where a list says so, all ranks go on through the chunks at once.
#include <algorithm>
#include <cstring>
#include <optional>

#include "data/memory/memory_operation.h"
#include "data/memory/streams.h"

namespace sirtaki {
namespace {

// An entry of the list of a rank's data, as it lies in a chunk. The first entry has the count of the others as bytes.
struct Piece {
  uint64_t address, bytes;
};
constexpr uint64_t nothing_listed = UINT64_MAX;

uint64_t pieces_that_fit(int64_t room) { return static_cast<uint64_t>(room) / sizeof(Piece) - 1; }

// Returns whether data can be listed in a chunk of `room` bytes, and are worth it: the kernel looks up each piece.
bool is_listable(const ScatterList& stream, int64_t room) {
  constexpr int64_t least_mean = 2 << 10;  // copied twice in the time of such a look-up
  return stream.pieces() * least_mean <= stream.bytes() &&
         static_cast<uint64_t>(stream.pieces()) <= pieces_that_fit(room);
}

// Lists the inputs of a stream.
void write_list(const ScatterList& stream, Piece* list) {
  uint64_t count = 0;
  stream.visit(0, stream.bytes(), [&](const uint8_t* input, uint8_t*, int64_t, int64_t bytes) {
    list[++count] = {reinterpret_cast<uintptr_t>(input), static_cast<uint64_t>(bytes)};
  });
  list[0] = {0, count};
}

// The data of another rank, as pieces of its memory.
class RemoteStream {
 public:
  // Copies the list first: a hostile rank may change it between a check and its use. Returns false if it lists less
  // than `wanted` bytes.
  bool open(const Piece* list, int64_t room, int64_t wanted) {
    Piece piece;
    std::memcpy(&piece, list, sizeof piece);
    const uint64_t count = piece.bytes;
    if (count > pieces_that_fit(room)) return false;
    int64_t total = 0;
    for (uint64_t i = 1; i <= count && total < wanted; ++i) {
      std::memcpy(&piece, list + i, sizeof piece);
      total += static_cast<int64_t>(std::min(piece.bytes, static_cast<uint64_t>(wanted - total)));
      addresses_.push_back(piece.address);
      ends_.push_back(total);
    }
    return total == wanted;
  }

  // Calls visit(address, bytes) for each contiguous part of [begin, end).
  template <typename Visit>
  void visit(int64_t begin, int64_t end, Visit&& visit_part) const {
    auto i = static_cast<size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
    for (; begin < end; ++i) {
      const int64_t first = i ? ends_[i - 1] : 0, bytes = std::min(end, ends_[i]) - begin;
      visit_part(addresses_[i] + static_cast<uint64_t>(begin - first), bytes);
      begin += bytes;
    }
  }

 private:
  std::vector<uint64_t> addresses_;
  std::vector<int64_t> ends_;  // positions in the stream
};

// Step 0 lists this rank's data, each of the next steps reads a chunk of the others', and the last one waits for all.
class SingleCopyMover final : public MemoryOperation {
 public:
  SingleCopyMover(const MemorySetting& setting, TransferPtr t)
      : MemoryOperation(setting, std::move(t)), streams_(transfer()), remote_(member_count()),
        id_(Milestone(transfer().plan, static_cast<uint64_t>(transfer().phase) + 1).value()) {
    rounds = 1;  // in which a chunk is written
    reads_ = rounds_for(most_wanted(transfer()), chunk_bytes());
    steps = step_count();
  }

  const char* algorithm() const override { return "single copy"; }
  int64_t step_count() const { return reads_ + 2; }
  bool must_be_repeated() const { return is_followed; }  // once it is done

 private:
  PeerMemory& memory() const { return local_peers().memory(); }
  Piece* list_of(size_t member) const { return reinterpret_cast<Piece*>(chunk(member, 0)); }

  bool step(int64_t index) override {
    if (index == 0) return list_own();
    if (index == 1 && !look_at_lists()) return false;
    if (is_followed) return true;
    if (index <= reads_) return read_part(index - 1);
    if (!all_past(index - 1)) return false;
    is_followed = std::ranges::any_of(slots(), [&](int slot) { return memory().has_not_read(slot, id_); });
    return true;
  }

  bool list_own() {
    if (!may_write(0)) return false;
    Piece* list = list_of(transfer().own);
    if (memory().has_failed() || !is_listable(streams_.own, chunk_bytes())) list[0] = {0, nothing_listed};
    else write_list(streams_.own, list);
    lend(0, reads_);
    return true;
  }

  // Looks whether a member lists nothing: then nobody reads. All members see the same lists.
  bool look_at_lists() {
    if (!all_past(0)) return false;
    for (size_t member = 0; member < member_count(); ++member)
      is_followed |= __atomic_load_n(&list_of(member)->bytes, __ATOMIC_RELAXED) == nothing_listed;
    return true;
  }

  bool is_awaited(int64_t index) const override { return index == 0 || index >= reads_; }

  // Reads a chunk of what this rank wants from the others, which it reads in turn, beginning with the next one: not all
  // ranks read the same one's memory at a time.
  bool read_part(int64_t round) {
    int64_t begin = round * chunk_bytes(), end = begin + chunk_bytes();
    copy_own_part(begin, round + 1 == reads_ ? INT64_MAX : end);
    for (size_t i = 1; i < member_count() && end > 0; ++i) {
      const size_t member = (transfer().own + i) % member_count();
      const int64_t bytes = streams_.wanted[member].bytes;
      if (begin < bytes) read_from(member, std::max<int64_t>(begin, 0), std::min(end, bytes));
      begin -= bytes;
      end -= bytes;
    }
    return true;
  }

  void copy_own_part(int64_t begin, int64_t end) const {
    const ScatterList& own =
        transfer().kind == Kind::broadcast ? transfer().buffer : transfer().incoming[transfer().own];
    const bool is_copied = transfer().kind != Kind::broadcast || transfer().own == transfer().root;
    if (is_copied) copy_own(own, std::min(begin, own.bytes()), std::min(end, own.bytes()));
  }

  // Reads the bytes [begin, end) of what this rank wants from a member.
  void read_from(size_t member, int64_t begin, int64_t end) {
    const Slice& wanted = streams_.wanted[member];
    std::optional<RemoteStream>& remote = remote_[member];
    if (!remote && !remote.emplace().open(list_of(member), chunk_bytes(), wanted.begin + wanted.bytes)) give_up();
    const bool is_broadcast = transfer().kind == Kind::broadcast;
    const ScatterList& list = is_broadcast ? transfer().buffer : transfer().incoming[member];
    list.visit(begin, end, [&](const uint8_t*, uint8_t* output, int64_t offset, int64_t bytes) {
      if (!output || has_given_up_) return;
      const int64_t at = wanted.begin + begin + offset;
      remote->visit(at, at + bytes, [&](uint64_t address, int64_t count) {
        from_.push_back({reinterpret_cast<void*>(static_cast<uintptr_t>(address)), static_cast<size_t>(count)});
        to_.push_back({output, static_cast<size_t>(count)});
        output += count;
        if (from_.size() == PeerMemory::most_parts) read_listed(member);
      });
    });
    read_listed(member);
  }

  void read_listed(size_t member) {
    if (!from_.empty() && !memory().read(slots()[member], from_, to_)) give_up();
  }

  void give_up() {
    has_given_up_ = true;
    memory().note_unread(id_);
  }

  Streams streams_;
  std::vector<std::optional<RemoteStream>> remote_;  // by member
  const uint64_t id_;  // of the operation, on all members
  int64_t reads_ = 0;
  std::vector<iovec> from_, to_;
  bool has_given_up_ = false;
};

// A mover with a single copy, and then one with two if that was not possible.
class TriedMover final : public Operation {
 public:
  TriedMover(const MemorySetting& setting, TransferPtr transfer)
      : setting_(setting), transfer_(std::move(transfer)),
        first_(std::make_unique<SingleCopyMover>(setting_, transfer_)) {}

  Status advance(Nanoseconds now, Progress& progress) override {
    if (second_) return second_->advance(now, progress);
    SIRTAKI_TRY(first_->advance(now, progress));
    if (progress == Progress::done && first_->must_be_repeated()) {
      second_ = make_staged_mover(setting_, transfer_, first_->step_count());
      progress = Progress::moved;
    }
    return Status::ok();
  }

  void cancel() override { setting_.local_peers.memory().withdraw(); }
  std::vector<int32_t> waits_for() const override { return running().waits_for(); }
  const char* algorithm() const override { return running().algorithm(); }

 private:
  const Operation& running() const { return second_ ? *second_ : *first_; }

  MemorySetting setting_;
  TransferPtr transfer_;
  std::unique_ptr<SingleCopyMover> first_;
  std::unique_ptr<Operation> second_;
};

// Returns whether a single copy takes less time than two. A broadcast of more than fits a core's cache does not: the
// root and the readers, which then take turns, get more bytes from memory than the readers alone. For the others all
// ranks are busy anyway.
bool pays(const Transfer& transfer, int64_t chunk_bytes) {
  constexpr int64_t few_bytes = 32 << 10;  // copied twice before all ranks have answered
  constexpr int64_t few_bytes_each = 4 << 10;  // from each of several members: every one is a call of the system
  const int64_t bytes = most_wanted(transfer);
  const auto sources = transfer.kind == Kind::broadcast ? 1 : static_cast<int64_t>(transfer.members.size()) - 1;
  return bytes >= std::max(few_bytes, sources * few_bytes_each) &&
         (transfer.kind != Kind::broadcast || bytes <= SharedRegion::chunks_a_cache * chunk_bytes);
}

// Returns whether the ranks read each other's memory: all of them answer alike.
bool is_single(const Transfer& transfer, const LocalPeers& peers) {
  const auto reads = [&](int32_t rank) { return peers.memory().reads_peers(peers.slot_of(rank)); };
  return transfer.prescale.is_one() && pays(transfer, peers.region().chunk_bytes_for(transfer.chunk_bytes)) &&
         std::ranges::all_of(transfer.members, reads);
}

}  // namespace

std::unique_ptr<Operation> make_memory_mover(const MemorySetting& setting, TransferPtr transfer) {
  if (!is_single(*transfer, setting.local_peers)) return make_staged_mover(setting, std::move(transfer), 0);
  return std::make_unique<TriedMover>(setting, std::move(transfer));
}

}  // namespace sirtaki
