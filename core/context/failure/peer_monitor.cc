#include "context/failure/peer_monitor.h"

#include <algorithm>

namespace sirtaki {
namespace {

constexpr Nanoseconds between_checks = milliseconds(50);            // of deadlines and local peers, while busy
constexpr Nanoseconds longest_wait_for_reason = milliseconds(200);  // which the lost rank itself may state

}  // namespace

bool PeerMonitor::check(Nanoseconds now) {
  if (now < next_check_) return false;
  next_check_ = now + between_checks;
  const EventWaiter::WakeEvents events = parts_.event_waiter.take_events();
  for (int slot : events.deaths) lose(parts_.own.local_peers->rank_in(slot), now);
  if (!parts_.failure.has_happened()) check_deadlines(now);
  return events.of_links;
}

void PeerMonitor::check_deadlines(Nanoseconds now) {
  if (suspect_ >= 0 && now >= suspect_until_) {
    const std::string text = parts_.own.name_of(suspect_) + " was lost: " + suspected_because_;
    return parts_.failure.fail({{SRT_PEER_LOST, text}, suspect_}, AbortScope::everyone, now);
  }
  if (const int32_t gone = finished_but_awaited(); gone >= 0) lose(gone, now);
  if (const auto silent = parts_.heartbeat.check(now)) return parts_.failure.fail(*silent, AbortScope::everyone, now);
  const auto oldest_waiting = [this] {
    const Access state(parts_.state);
    return state->oldest_unplanned();
  };
  const auto late = parts_.deadline_monitor.check(now, parts_.execution, parts_.execution.executor(),
                                                  parts_.negotiation, oldest_waiting);
  if (late) parts_.failure.fail(*late, AbortScope::everyone, now);
}

// Returns a rank that has said goodbye without sending the awaited bytes; -1: none. Bytes sent just before a goodbye
// have arrived once the goodbye is seen, so the awaited ranks are determined once more.
int32_t PeerMonitor::finished_but_awaited() const {
  const Executor& executor = parts_.execution.executor();
  std::vector<int32_t> late = executor.stuck().waits_for;
  std::erase_if(late, [&](int32_t rank) { return !parts_.negotiation.has_finished(rank); });
  if (late.empty()) return -1;
  const std::vector<int32_t> still_late = executor.stuck().waits_for;
  for (int32_t rank : late)
    if (std::find(still_late.begin(), still_late.end(), rank) != still_late.end()) return rank;
  return -1;
}

void PeerMonitor::lose(int32_t rank, Nanoseconds now, std::string how) {
  if (parts_.failure.has_happened() || suspect_ >= 0) return;
  parts_.pending_abort.look(now);
  parts_.pending_abort.act(now);
  if (parts_.failure.has_happened() || parts_.pending_abort.is_received()) return;
  suspect_ = rank;
  suspected_because_ = std::move(how);
  const bool is_local = parts_.own.local_peers && parts_.own.local_peers->slot_of(rank) >= 0;
  suspect_until_ = is_local ? now + 1 : now + longest_wait_for_reason;
  next_check_ = std::min(next_check_, suspect_until_);
}

Nanoseconds PeerMonitor::next_due() const {
  return suspect_ >= 0 && !parts_.failure.has_happened() ? suspect_until_ : never;
}

}  // namespace sirtaki
