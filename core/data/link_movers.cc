// Broadcast and all-gather over links: the owner of the bytes sends them to each other member.
#include <algorithm>
#include <cstring>

#include "data/link_operation.h"

namespace sirtaki {
namespace {

class LinkBroadcast final : public LinkOperation {
 public:
  LinkBroadcast(const LinkSetting& setting, std::shared_ptr<const Transfer> t) : LinkOperation(setting, std::move(t)) {
    steps = (transfer().buffer.bytes() + chunk_bytes() - 1) / chunk_bytes();
  }

 private:
  Status step(int64_t round, bool& finished) override {
    const int64_t begin = round * chunk_bytes(), end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    if (transfer().own == transfer().root) {
      finished = all_have_room();
      if (finished) send(round, begin, end);
      return Status::ok();
    }
    std::span<const uint8_t> body;
    SIRTAKI_TRY(arrived(transfer().root, round, end - begin, body));
    if (!body.data()) return Status::ok();
    unpack(transfer().buffer, begin, end, body.data());
    consume(transfer().root);
    finished = true;
    return Status::ok();
  }

  void send(int64_t round, int64_t begin, int64_t end) {
    for (size_t member = 0; member < member_count(); ++member)
      if (member != transfer().own) pack_bytes(begin, end, compose(member, round, end - begin).data());
    transfer().buffer.visit(begin, end, [](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
      if (output && output != input) std::memcpy(output, input, static_cast<size_t>(bytes));
    });
  }
};

class LinkAllgather final : public LinkOperation {
 public:
  LinkAllgather(const LinkSetting& setting, std::shared_ptr<const Transfer> t) : LinkOperation(setting, std::move(t)) {
    int64_t most = 0;
    for (const ScatterList& part : transfer().gathered) most = std::max(most, part.bytes());
    steps = 2 * ((most + chunk_bytes() - 1) / chunk_bytes());
    got_.resize(member_count());
  }

 private:
  // Step 2r sends chunk r of this rank's part, step 2r + 1 collects chunk r of everyone's.
  Status step(int64_t index, bool& finished) override {
    const int64_t round = index / 2;
    if (index % 2 == 1) return collect(round, finished);
    finished = all_have_room();
    if (!finished) return Status::ok();
    const int64_t begin = round * chunk_bytes(), end = begin + bytes_of(transfer().own, round);
    for (size_t member = 0; member < member_count() && begin < end; ++member)
      if (member != transfer().own) pack_bytes(begin, end, compose(member, round, end - begin).data());
    if (begin < end) copy_own(begin, end);
    return Status::ok();
  }

  int64_t bytes_of(size_t member, int64_t round) const {
    return std::clamp<int64_t>(transfer().gathered[member].bytes() - round * chunk_bytes(), 0, chunk_bytes());
  }

  void copy_own(int64_t begin, int64_t end) {
    transfer().buffer.visit(begin, end, [&](const uint8_t* input, uint8_t*, int64_t offset, int64_t bytes) {
      unpack(transfer().gathered[transfer().own], begin + offset, begin + offset + bytes, input);
    });
  }

  Status collect(int64_t round, bool& finished) {
    finished = true;
    for (size_t member = 0; member < member_count(); ++member) {
      const int64_t bytes = bytes_of(member, round);
      if (member == transfer().own || got_[member] > round || bytes == 0) continue;
      std::span<const uint8_t> body;
      SIRTAKI_TRY(arrived(member, round, bytes, body));
      if (!body.data()) {
        finished = false;
        continue;
      }
      unpack(transfer().gathered[member], round * chunk_bytes(), round * chunk_bytes() + bytes, body.data());
      consume(member);
      got_[member] = round + 1;
    }
    return Status::ok();
  }

  std::vector<int64_t> got_;  // by member: rounds that are here
};

}  // namespace

std::unique_ptr<Operation> make_link_broadcast(const LinkSetting& setting, std::shared_ptr<const Transfer> transfer) {
  return std::make_unique<LinkBroadcast>(setting, std::move(transfer));
}

std::unique_ptr<Operation> make_link_allgather(const LinkSetting& setting, std::shared_ptr<const Transfer> transfer) {
  return std::make_unique<LinkAllgather>(setting, std::move(transfer));
}

}  // namespace sirtaki
