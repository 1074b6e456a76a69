#include "context/failure/pending_abort.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds longest_wait = milliseconds(200);  // for the Decision that an abort has overtaken

}  // namespace

void PendingAbort::request(std::string reason) {
  {
    const MutexLock lock(mutex_);
    if (reason_.empty()) reason_ = std::move(reason);
  }
  is_requested_.store(true, std::memory_order_seq_cst);
}

std::string PendingAbort::reason() {
  const MutexLock lock(mutex_);
  return reason_;
}

void PendingAbort::look(Nanoseconds now) {
  if (failure_.has_happened()) return;
  if (is_requested_.load(std::memory_order_relaxed)) {
    const Status status{SRT_ABORTED, own_.name() + " gave up: " + reason()};
    return failure_.fail({status, own_.rank, negotiation_.negotiator().last_decision()}, AbortScope::everyone, now);
  }
  if (!own_.local_peers || received_) return;
  if (auto notice = failure_of_host(*own_.local_peers)) receive(std::move(*notice), now);
}

void PendingAbort::receive(AbortNotice notice, Nanoseconds now) {
  if (received_) return;
  negotiation_.pass_on(notice, now);
  received_ = std::move(notice);
  due_at_ = now + longest_wait;
}

void PendingAbort::act(Nanoseconds now) {
  if (!received_ || failure_.has_happened()) return;
  const bool is_behind = negotiation_.negotiator().last_decision() < received_->decision;
  if (!is_behind || now >= due_at_) failure_.fail(*received_, AbortScope::host, now);
}

Nanoseconds PendingAbort::next_due() const { return received_ && !failure_.has_happened() ? due_at_ : never; }

}  // namespace sirtaki
