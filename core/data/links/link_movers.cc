// Broadcast, all-gather and all-to-all over links: the owner of the bytes sends them to each other member.
#include <algorithm>
#include <cstring>

#include "data/links/link_operation.h"

namespace sirtaki {
namespace {

class LinkBroadcast final : public LinkOperation {
 public:
  LinkBroadcast(const LinkSetting& setting, TransferPtr t) : LinkOperation(setting, std::move(t)) {
    steps = (transfer().buffer.bytes() + chunk_bytes() - 1) / chunk_bytes();
  }

 private:
  bool exchanges_with(size_t member) const override {
    return transfer().own == transfer().root || member == transfer().root;
  }

  Status step(int64_t round, bool& finished) override {
    const int64_t begin = round * chunk_bytes(), end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    if (transfer().own == transfer().root) {
      finished = all_have_room();
      if (finished) send(round, begin, end);
      return Status::ok();
    }
    return take(transfer().root, round, transfer().buffer, begin, end, finished);
  }

  void send(int64_t round, int64_t begin, int64_t end) {
    for (size_t member = 0; member < member_count(); ++member)
      if (member != transfer().own) send_inputs(member, round, transfer().buffer, begin, end);
    copy_own(transfer().buffer, begin, end);
  }
};

// All-gather and all-to-all, by pairwise exchange.
class LinkExchange final : public LinkOperation {
 public:
  LinkExchange(const LinkSetting& setting, TransferPtr t) : LinkOperation(setting, std::move(t)) {
    int64_t most = 0;
    for (const ScatterList& part : transfer().incoming) most = std::max(most, part.bytes());
    for (int64_t flow : transfer().flows) most = std::max(most, flow);
    rounds_ = std::max<int64_t>(1, (most + chunk_bytes() - 1) / chunk_bytes());
    steps = 2 * rounds_;
    got_.resize(member_count());
  }

 private:
  // Sends chunk r of each member's data in step 2r; receives chunk r from all members in step 2r + 1.
  Status step(int64_t index, bool& finished) override {
    const int64_t round = index / 2;
    if (index % 2 == 1) return collect(round, finished);
    finished = all_have_room();
    if (!finished) return Status::ok();
    for (size_t member = 0; member < member_count(); ++member) {
      if (member == transfer().own) continue;
      const ScatterList& list = traits(transfer().kind).has_splits ? transfer().outgoing[member] : transfer().buffer;
      const int64_t begin = round * chunk_bytes(), bytes = bytes_of(list, round);
      if (bytes) send_inputs(member, round, list, begin, begin + bytes);
    }
    const ScatterList& own = transfer().incoming[transfer().own];
    if (round == 0) copy_own(own, 0, own.bytes());
    return Status::ok();
  }

  int64_t bytes_of(const ScatterList& list, int64_t round) const {
    return std::clamp<int64_t>(list.bytes() - round * chunk_bytes(), 0, chunk_bytes());
  }

  Status collect(int64_t round, bool& finished) {
    finished = true;
    for (size_t member = 0; member < member_count(); ++member) {
      const int64_t bytes = bytes_of(transfer().incoming[member], round);
      if (member == transfer().own || got_[member] > round || bytes == 0) continue;
      const int64_t begin = round * chunk_bytes();
      bool is_here = false;
      SIRTAKI_TRY(take(member, round, transfer().incoming[member], begin, begin + bytes, is_here));
      if (is_here) got_[member] = round + 1;
      finished &= is_here;
    }
    return Status::ok();
  }

  int64_t rounds_ = 0;
  std::vector<int64_t> got_;  // by member: rounds that have arrived
};

}  // namespace

std::unique_ptr<Operation> make_link_broadcast(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<LinkBroadcast>(setting, std::move(transfer));
}

std::unique_ptr<Operation> make_link_exchange(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<LinkExchange>(setting, std::move(transfer));
}

}  // namespace sirtaki
