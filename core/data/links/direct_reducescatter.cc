// Reduce-scatter by pairwise exchange, the first half of the all-reduce: each rank sends every other rank that rank's
// part, and sums its own part in rank order.
#include <algorithm>

#include "data/links/link_operation.h"

namespace sirtaki {
namespace {

class DirectReducescatter final : public LinkOperation {
 public:
  DirectReducescatter(const LinkSetting& setting, TransferPtr t) : LinkOperation(setting, std::move(t)) {
    int64_t most = 0;
    for (const ScatterList& part : transfer().outgoing) most = std::max(most, part.bytes());
    steps = 2 * ((most + chunk_bytes() - 1) / chunk_bytes());
  }

 private:
  // Sends chunk r of every other member's part in step 2r; reduces chunk r of this rank's part in step 2r + 1.
  Status step(int64_t index, bool& finished) override {
    const int64_t round = index / 2;
    if (index % 2 == 1) return reduce_own(round, finished);
    finished = all_have_room();
    for (size_t member = 0; finished && member < member_count(); ++member) {
      const auto [begin, end] = range(member, round);
      if (member != transfer().own && begin < end) send_inputs(member, round, transfer().outgoing[member], begin, end);
    }
    return Status::ok();
  }

  Status reduce_own(int64_t round, bool& finished) {
    const ScatterList& list = transfer().outgoing[transfer().own];
    const auto [begin, end] = range(transfer().own, round);
    finished = begin == end;
    if (finished) return Status::ok();
    SIRTAKI_TRY(all_arrived(round, end - begin, bodies_, finished));
    if (!finished) return Status::ok();
    reduce(bodies_, list, begin, end, scratch_);
    consume_all();
    return Status::ok();
  }

  std::pair<int64_t, int64_t> range(size_t member, int64_t round) const {
    const int64_t bytes = transfer().outgoing[member].bytes();
    return {std::min(bytes, round * chunk_bytes()), std::min(bytes, (round + 1) * chunk_bytes())};
  }

  std::vector<const uint8_t*> bodies_;  // by member
  std::vector<uint8_t> scratch_;
};

}  // namespace

std::unique_ptr<Operation> make_link_reducescatter(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<DirectReducescatter>(setting, std::move(transfer));
}

}  // namespace sirtaki
