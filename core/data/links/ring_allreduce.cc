// All-reduce along a ring: each rank exchanges data only with the ranks before and after it, so it scales to worlds
// with too many ranks for connections between all pairs. After Patarasuk and Yuan, "Bandwidth optimal all-reduce
// algorithms for clusters of workstations" (2009). The order of summation depends on the position in the buffer, and
// 16-bit floats are rounded at every hop.
#include <algorithm>

#include "data/links/link_operation.h"

namespace sirtaki {
namespace {

class RingAllreduce final : public LinkOperation {
 public:
  RingAllreduce(const LinkSetting& setting, TransferPtr t) : LinkOperation(setting, std::move(t)) {
    members_ = static_cast<int64_t>(member_count());
    round_bytes_ = chunk_bytes() * members_;
    const int64_t rounds = (transfer().buffer.bytes() + round_bytes_ - 1) / round_bytes_;
    hops_ = 2 * (members_ - 1);
    steps = rounds * 2 * hops_;  // a sending and a receiving step per hop
    work_.resize(static_cast<size_t>(std::min(round_bytes_, transfer().buffer.bytes())));
  }

  const char* algorithm() const override { return "ring"; }

 private:
  bool exchanges_with(size_t member) const override { return member == neighbour(1) || member == neighbour(-1); }

  Status step(int64_t index, bool& finished) override {
    const int64_t hop_index = index / 2, round = hop_index / hops_, hop = hop_index % hops_;
    const auto own = static_cast<int64_t>(transfer().own);
    begin_ = round * round_bytes_;
    bytes_ = std::min(round_bytes_, transfer().buffer.bytes() - begin_);
    if (index % 2 == 0) {
      if (hop == 0) pack_bytes(transfer().buffer, begin_, begin_ + bytes_, work_.data());
      finished = send(wrap(own - hop), hop_index);
      return Status::ok();
    }
    SIRTAKI_TRY(receive(wrap(own - hop - 1), hop, hop_index, finished));
    if (finished && hop == hops_ - 1) unpack(transfer().buffer, begin_, begin_ + bytes_, work_.data());
    return Status::ok();
  }

  int64_t wrap(int64_t position) const { return (position % members_ + members_) % members_; }

  size_t neighbour(int64_t distance) const {
    return static_cast<size_t>(wrap(static_cast<int64_t>(transfer().own) + distance));
  }

  Slice slice(int64_t position) const { return slice_of(bytes_, member_count(), static_cast<size_t>(position)); }

  bool send(int64_t position, int64_t tag) {
    const size_t next = neighbour(1);
    if (!has_room(next)) return false;
    const Slice part = slice(position);
    std::copy_n(work_.data() + part.begin, part.bytes, compose(next, tag, part.bytes).begin());
    return true;
  }

  // Receives a slice, which is added in the first half of the hops and is final in the second half.
  Status receive(int64_t position, int64_t hop, int64_t tag, bool& finished) {
    const size_t previous = neighbour(-1);
    const Slice part = slice(position);
    std::span<const uint8_t> body;
    SIRTAKI_TRY(arrived(previous, tag, part.bytes, body));
    if (!body.data()) return Status::ok();
    uint8_t* mine = work_.data() + part.begin;
    if (hop < members_ - 1) {
      const void* const sources[] = {body.data(), mine};
      const Scale scale = hop == members_ - 2 ? transfer().postscale : Scale{};  // the last addition completes it
      reduce_kernel()(mine, sources, 2, static_cast<size_t>(part.bytes) / transfer().element_bytes(), scale);
    } else {
      std::copy_n(body.data(), part.bytes, mine);
    }
    consume(previous);
    finished = true;
    return Status::ok();
  }

  int64_t members_ = 0, round_bytes_ = 0, hops_ = 0;
  int64_t begin_ = 0, bytes_ = 0;  // of the current round
  std::vector<uint8_t> work_;
};

}  // namespace

std::unique_ptr<Operation> make_ring_allreduce(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<RingAllreduce>(setting, std::move(transfer));
}

}  // namespace sirtaki
