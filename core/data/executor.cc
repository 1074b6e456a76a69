#include "data/executor.h"

#include <algorithm>

namespace sirtaki {

Status Executor::advance(Nanoseconds now, std::vector<uint64_t>& finished, bool& moved) {
  SIRTAKI_TRY(start_what_can(now, finished, moved));
  for (size_t i = 0; i < active_.size();) {
    Progress progress = Progress::blocked;
    SIRTAKI_TRY(active_[i].operation->advance(now, progress));
    if (progress != Progress::blocked) {
      moved = true;
      last_moved_ = now;
    }
    if (progress == Progress::done) {
      finished.push_back(active_[i].transfer->plan);
      active_.erase(active_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return Status::ok();
}

Status Executor::start_what_can(Nanoseconds now, std::vector<uint64_t>& finished, bool& moved) {
  while (!queue_.empty()) {
    const Transfer& next = *queue_.front();
    const auto backend =
        std::find_if(backends_.begin(), backends_.end(), [&](const auto& b) { return b->serves(next); });
    if (backend == backends_.end()) return {SRT_INTERNAL, "no backend can run an operation that was agreed on"};
    if (is_taken((*backend)->needs())) break;
    if (next.times) next.times->started = now;
    if (auto operation = (*backend)->start(queue_.front()))
      active_.push_back({queue_.front(), std::move(operation), (*backend)->needs()});
    else finished.push_back(next.plan);
    queue_.pop_front();
    moved = true;
    last_moved_ = now;
  }
  return Status::ok();
}

bool Executor::is_taken(unsigned needs) const {
  return std::any_of(active_.begin(), active_.end(), [&](const Active& a) { return (a.needs & needs) != 0; });
}

const Transfer* Executor::stuck(std::vector<int32_t>& waits_for) const {
  if (active_.empty()) return nullptr;
  waits_for = active_.front().operation->waits_for();
  return active_.front().transfer.get();
}

void Executor::cancel() {
  queue_.clear();
  for (Active& active : active_) active.operation->cancel();
}

bool Executor::is_quiet() {
  std::erase_if(active_, [](const Active& active) { return active.operation->is_quiet(); });
  return active_.empty();
}

}  // namespace sirtaki
