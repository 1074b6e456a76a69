// All-reduce of few bytes: in each of log2(members) steps every member exchanges all its data with a partner twice as
// far away. After Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
// section 4.5, for any number of members: each member in excess of a power of two, among the first ones, sends its
// elements to the next member, and receives the result from it.
//
// Partners combine the same two values in the same order, the lower members' first, so that all members get the same
// bits. That order is a tree's, not that of the ranks, and 16-bit floats are rounded at every step.
#include <algorithm>
#include <bit>

#include "data/links/link_operation.h"

namespace sirtaki {
namespace {

class RecursiveDoubling final : public LinkOperation {
 public:
  RecursiveDoubling(const LinkSetting& setting, TransferPtr t) : LinkOperation(setting, std::move(t)) {
    const size_t core = std::bit_floor(member_count());
    levels_ = std::countr_zero(core);
    guests_ = member_count() - core;
    // Steps per chunk: pack, hand over, exchange level by level, hand back, unpack. Sending and receiving are
    // separate steps.
    steps_each_ = 2 * levels_ + 6;
    steps = (transfer().buffer.bytes() + chunk_bytes() - 1) / chunk_bytes() * steps_each_;
    work_.resize(static_cast<size_t>(std::min(chunk_bytes(), transfer().buffer.bytes())));
  }

  const char* algorithm() const override { return "recursive_doubling"; }

 private:
  bool exchanges_with(size_t member) const override {
    if (is_in_pair() && member == (is_guest() ? transfer().own + 1 : transfer().own - 1)) return true;
    for (int64_t level = 0; level < levels_ && !is_guest(); ++level)
      if (member == partner_at(level)) return true;
    return false;
  }

  Status step(int64_t index, bool& finished) override {
    const int64_t round = index / steps_each_, part = index % steps_each_;
    const int64_t begin = round * chunk_bytes(), end = std::min(begin + chunk_bytes(), transfer().buffer.bytes());
    bytes_ = end - begin;
    finished = true;
    if (part == 0) pack_bytes(transfer().buffer, begin, end, work_.data());
    else if (part == steps_each_ - 1) unpack(transfer().buffer, begin, end, work_.data());
    else if (part <= 2) return hand_over(part == 1, index, finished);
    else if (part >= steps_each_ - 3) return hand_back(part == steps_each_ - 3, index, finished);
    else return exchange((part - 3) / 2, part % 2 == 1, index, finished);
    return Status::ok();
  }

  // The first 2 * guests_ members form pairs of a guest and the next member, which takes part in its place.
  bool is_in_pair() const { return transfer().own < 2 * guests_; }
  bool is_guest() const { return is_in_pair() && transfer().own % 2 == 0; }

  // Return this rank's virtual rank, its index among the members that exchange, and the member with a virtual rank.
  size_t virtual_rank() const { return is_in_pair() ? transfer().own / 2 : transfer().own - guests_; }
  size_t member_of(size_t virtual_rank) const {
    return virtual_rank < guests_ ? 2 * virtual_rank + 1 : virtual_rank + guests_;
  }

  size_t partner_at(int64_t level) const { return member_of(virtual_rank() ^ (size_t{1} << level)); }

  Status hand_over(bool is_sending, int64_t tag, bool& finished) {
    if (!is_in_pair() || is_sending != is_guest()) return Status::ok();
    if (is_sending) return send(transfer().own + 1, tag, finished);
    return combine(transfer().own - 1, tag - 1, {}, finished);
  }

  Status exchange(int64_t level, bool is_sending, int64_t tag, bool& finished) {
    if (is_guest()) return Status::ok();
    const size_t partner = partner_at(level);
    if (is_sending) return send(partner, tag, finished);
    return combine(partner, tag - 1, level == levels_ - 1 ? transfer().postscale : Scale{}, finished);
  }

  Status hand_back(bool is_sending, int64_t tag, bool& finished) {
    if (!is_in_pair() || is_sending == is_guest()) return Status::ok();
    if (is_sending) return send(transfer().own - 1, tag, finished);
    std::span<const uint8_t> body;
    SIRTAKI_TRY(arrived(transfer().own + 1, tag - 1, bytes_, body));
    finished = body.data() != nullptr;
    if (!finished) return Status::ok();
    std::copy(body.begin(), body.end(), work_.begin());
    consume(transfer().own + 1);
    return Status::ok();
  }

  Status send(size_t member, int64_t tag, bool& finished) {
    finished = has_room(member);
    if (finished) std::copy_n(work_.begin(), bytes_, compose(member, tag, bytes_).begin());
    return Status::ok();
  }

  Status combine(size_t member, int64_t tag, Scale scale, bool& finished) {
    std::span<const uint8_t> body;
    SIRTAKI_TRY(arrived(member, tag, bytes_, body));
    finished = body.data() != nullptr;
    if (!finished) return Status::ok();
    const bool is_lower = member < transfer().own;
    const void* const sources[] = {is_lower ? body.data() : work_.data(), is_lower ? work_.data() : body.data()};
    reduce_kernel()(work_.data(), sources, 2, static_cast<size_t>(bytes_) / transfer().element_bytes(), scale);
    consume(member);
    return Status::ok();
  }

  int64_t levels_ = 0, steps_each_ = 0;
  size_t guests_ = 0;
  int64_t bytes_ = 0;  // size of the current chunk
  std::vector<uint8_t> work_;
};

}  // namespace

std::unique_ptr<Operation> make_recursive_doubling(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<RecursiveDoubling>(setting, std::move(transfer));
}

}  // namespace sirtaki
