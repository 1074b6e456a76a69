#include "data/executor.h"

#include <algorithm>

namespace sirtaki {

Status Executor::advance(Nanoseconds now, Changes& changes) {
  SIRTAKI_TRY(start_what_can(now, changes));
  for (size_t i = 0; i < active_.size();) {
    bool is_done = false;
    SIRTAKI_TRY(advance_one(active_[i], now, changes, is_done));
    if (is_done) active_.erase(active_.begin() + static_cast<ptrdiff_t>(i));
    else ++i;
  }
  return Status::ok();
}

Status Executor::advance_one(Active& active, Nanoseconds now, Changes& changes, bool& is_done) {
  Progress progress = Progress::blocked;
  if (Status status = active.operation->advance(now, progress); !status.is_ok()) {
    changes.failed = active.transfer->plan;
    return status;
  }
  if (progress != Progress::blocked) {
    changes.moved = true;
    last_moved_ = now;
  }
  is_done = progress == Progress::done;
  if (is_done) {
    const Transfer& transfer = *active.transfer;
    changes.finished.push_back({transfer.plan, active.backend->name(transfer), active.operation->algorithm()});
  } else if (!active.is_launched) {
    if (auto event = active.operation->launched()) {
      active.is_launched = true;
      changes.launched.push_back({active.transfer->plan, std::move(event)});
    }
  }
  return Status::ok();
}

Status Executor::start_what_can(Nanoseconds now, Changes& changes) {
  while (!queue_.empty()) {
    const Transfer& next = *queue_.front();
    const auto backend =
        std::find_if(backends_.begin(), backends_.end(), [&](const auto& b) { return b->serves(next); });
    if (backend == backends_.end()) return {SRT_INTERNAL, "no backend can run an operation that was agreed on"};
    const unsigned needs = (*backend)->needs(next);
    if (is_taken(needs)) break;
    if (next.times) next.times->started = now;
    if (auto operation = (*backend)->start(queue_.front()))
      active_.push_back({queue_.front(), backend->get(), std::move(operation), needs});
    else changes.finished.push_back({next.plan, (*backend)->name(next), ""});
    queue_.pop_front();
    changes.moved = true;
    last_moved_ = now;
  }
  return Status::ok();
}

bool Executor::is_taken(unsigned needs) const {
  return std::any_of(active_.begin(), active_.end(), [&](const Active& active) {
    return (active.operation->still_needs(active.needed_at_start) & needs) != 0;
  });
}

bool Executor::must_be_polled() const {
  return std::any_of(active_.begin(), active_.end(), [](const Active& a) { return a.operation->must_be_polled(); });
}

Executor::Stuck Executor::stuck() const {
  if (active_.empty()) return {};
  const auto describe = [](const Active& active) {
    return Stuck{active.transfer.get(), active.operation->waits_for(), active.operation->device_wait()};
  };
  const Stuck oldest = describe(active_.front());
  if (oldest.device_wait != DeviceWait::input) return oldest;
  const auto found =
      std::find_if(active_.begin(), active_.end(), [](const Active& a) { return !a.operation->waits_for().empty(); });
  return found == active_.end() ? oldest : describe(*found);
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
