#include "context/iteration.h"

#include <algorithm>
#include <new>

namespace sirtaki {
namespace {

constexpr Nanoseconds shortest_look = microseconds(50), longest_look = milliseconds(1);  // between looks at a GPU

}  // namespace

bool Iteration::run(Nanoseconds now) {
  try {
    return run_parts(now);
  } catch (const std::bad_alloc&) {
    parts_.failure.fail_without_memory(now);
    return false;
  }
}

bool Iteration::run_parts(Nanoseconds now) {
  EngineFailure& failure = parts_.failure;
  bool moved = parts_.intake.take(now, failure.has_happened());
  const Status readiness = parts_.intake.take_ready(now, failure.has_happened(), moved);
  if (!readiness.is_ok()) failure.fail(readiness, now);
  parts_.pending_abort.look(now);
  if (!failure.has_happened()) moved |= negotiate(now);
  if (!failure.has_happened()) {
    const Status status = parts_.execution.advance(now, moved);
    if (!status.is_ok()) failure.fail(status, now);
  }
  if (moved) moved_at_ = now;
  moved |= parts_.peer_monitor.check(now);
  if (failure.has_happened()) {
    failure.end_all_when_quiet();
    parts_.negotiation.flush_links(now);
  }
  return moved;
}

bool Iteration::negotiate(Nanoseconds now) {
  events_.clear();
  const Status status = parts_.negotiation.pass(now, events_);
  if (!status.is_ok()) parts_.failure.fail(status, now);
  else act_on_events(now);
  parts_.pending_abort.act(now);
  return events_.moved;
}

void Iteration::act_on_events(Nanoseconds now) {
  const Status status = parts_.outcome_handler.apply(events_, now);
  if (!status.is_ok()) return parts_.failure.fail(status, now);
  if (!events_.outcome.fatal.is_ok())
    return parts_.failure.fail({events_.outcome.fatal, events_.outcome.culprit}, AbortScope::everyone, now);
  if (events_.finished_above >= 0) {  // nothing is decided any more
    const std::string& who = parts_.own.name_of(events_.finished_above);
    parts_.intake.close({SRT_PEER_FINISHED, who + " has finished and cannot take part"});
  }
  if (events_.abort) parts_.pending_abort.receive(*events_.abort, AbortScope::host, now);
  for (int32_t rank : events_.lost) parts_.peer_monitor.lose(rank, now);
}

bool Iteration::must_run_again() {
  if (parts_.intake.has_work()) return true;
  if (parts_.pending_abort.is_requested() && !parts_.failure.has_happened()) return true;
  if (parts_.links.has_inbound()) return true;
  return run(now());
}

bool Iteration::has_work_left(Nanoseconds now) const {
  return is_busy() || parts_.negotiation.negotiator().report_due() <= now || parts_.links.has_inbound() ||
         parts_.links.has_outbound() || parts_.intake.has_work();
}

Nanoseconds Iteration::device_awaited_for(Nanoseconds now) const {
  const bool is_awaited = parts_.intake.awaits_inputs() || parts_.execution.executor().must_be_polled();
  return is_awaited ? now - moved_at_ : -1;
}

Nanoseconds Iteration::next_due(Nanoseconds now) const {
  Nanoseconds due = std::min({parts_.negotiation.next_due(), parts_.peer_monitor.next_due(),
                              parts_.pending_abort.next_due(), now + longest_sleep});
  // A device is looked at after a sixteenth of the time waited so far.
  if (const Nanoseconds waited = device_awaited_for(now); waited >= 0)
    due = std::min(due, now + std::clamp(waited / 16, shortest_look, longest_look));
  // A full ring does not signal when it has room again; sockets do.
  if (parts_.links.rings_have_outbound()) due = std::min(due, now + milliseconds(1));
  return due;
}

}  // namespace sirtaki
