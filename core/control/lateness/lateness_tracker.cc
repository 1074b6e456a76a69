#include "control/lateness/lateness_tracker.h"

#include <algorithm>

namespace sirtaki {
namespace {

constexpr Nanoseconds between_publications = milliseconds(500);

}  // namespace

void LatenessTracker::was_last(int32_t rank, Nanoseconds by) {
  const auto index = static_cast<size_t>(rank);
  Lateness& lateness = by_rank_[index];
  ++lateness.times;
  lateness.total += by;
  lateness.longest = std::max(lateness.longest, by);
  has_changed_[index] = any_changed_ = true;
}

void LatenessTracker::publish(Nanoseconds now, std::vector<RankLateness>& out) {
  if (!any_changed_ || now < next_) return;
  next_ = now + between_publications;
  any_changed_ = false;
  for (size_t index = 0; index < by_rank_.size(); ++index) {
    if (!has_changed_[index]) continue;
    has_changed_[index] = false;
    out.push_back({static_cast<int32_t>(index), by_rank_[index]});
  }
}

}  // namespace sirtaki
