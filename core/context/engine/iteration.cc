#include "context/engine/iteration.h"

#include <algorithm>
#include <new>

namespace sirtaki {
namespace {

constexpr Nanoseconds shortest_look = microseconds(50),
                      longest_look = milliseconds(1);  // between polls of a GPU or MPI

}  // namespace

bool Iteration::run(Nanoseconds now) {
  const bool had_ended = parts_.failure.has_ended_all();
  bool moved = false;
  try {
    moved = run_parts(now);
  } catch (const std::bad_alloc&) {
    parts_.failure.fail_without_memory(now);
  }
  return moved || parts_.failure.has_ended_all() != had_ended;
}

bool Iteration::run_parts(Nanoseconds now) {
  EngineFailure& failure = parts_.failure;
  if (parts_.link_intake.has_news()) take_links(now);
  bool moved = parts_.intake.take(now, failure.has_happened());
  const Status readiness = parts_.intake.take_ready(now, failure.has_happened(), moved);
  if (!readiness.is_ok()) failure.fail(readiness, now);
  parts_.pending_abort.look(now);
  if (!failure.has_happened()) moved |= negotiate(now);
  if (!failure.has_happened()) {
    const Status status = parts_.execution.advance(now, moved);
    if (!status.is_ok()) failure.fail(status, now);
    else if (parts_.links.has_requests()) parts_.link_intake.ask(parts_.links.take_requests());
  }
  if (moved) moved_at_ = now;
  links_signalled_ = parts_.peer_monitor.check(now);
  moved |= links_signalled_;
  if (failure.has_happened()) {
    parts_.link_intake.close();
    parts_.links.give_up_polled();
    failure.end_all_when_quiet();
    parts_.negotiation.flush_links(now);
  }
  return moved;
}

void Iteration::take_links(Nanoseconds now) {
  LinkIntake::News news = parts_.link_intake.take();
  if (parts_.failure.has_happened()) return;
  for (auto& [peer, pipe] : news.made) parts_.links.add_socket(peer, std::move(pipe));
  Status status = parts_.event_waiter.watch_links();
  if (status.is_ok()) status = parts_.links.watch();
  if (!status.is_ok()) parts_.failure.fail(status, now);
  else if (news.failed) parts_.peer_monitor.lose(news.failed->first, now, news.failed->second);
}

bool Iteration::negotiate(Nanoseconds now) {
  events_.clear();
  if (auto wishes = parts_.settings.take_wishes()) parts_.negotiation.change_settings(std::move(*wishes));
  const Status status = parts_.negotiation.advance(now, events_);
  if (!status.is_ok()) parts_.failure.fail(status, now);
  else act_on_events(now);
  parts_.pending_abort.act(now);
  return events_.moved;
}

void Iteration::act_on_events(Nanoseconds now) {
  observe(now);
  const Status status = apply(events_.outcome, now);
  if (!status.is_ok()) return parts_.failure.fail(status, now);
  if (!events_.outcome.fatal.is_ok())
    return parts_.failure.fail({events_.outcome.fatal, events_.outcome.culprit}, AbortScope::everyone, now);
  if (events_.finished_above >= 0) {  // no Decision comes any more
    const std::string& who = parts_.own.name_of(events_.finished_above);
    parts_.intake.close({SRT_PEER_FINISHED, who + " has finished and cannot take part"});
  }
  if (events_.abort) parts_.pending_abort.receive(*events_.abort, now);
  for (const LostPeer& lost : events_.lost)
    parts_.peer_monitor.lose(lost.rank, now, lost.because.empty() ? PeerMonitor::process_ended : lost.because);
}

void Iteration::observe(Nanoseconds now) {
  if (!events_.has_reported && !events_.has_decided) return;
  const Access state(parts_.state);
  Observer& observer = state->observer;
  observer.set_moment(now);
  if (events_.has_decided) observer.decision_applied();
  for (const RankLateness& late : events_.outcome.lateness) observer.set_lateness(late.rank, late.lateness);
  for (const Stall& stall : events_.outcome.stalls)
    if (!stall.is_over && std::ranges::count(stall.missing, parts_.own.rank)) observer.stalled();
  if (!events_.has_reported) return;
  for (const Negotiator::Reported& reported : parts_.negotiation.negotiator().reported())
    if (const HandleEntry* entry = state->handles.open_entry(reported.ticket))
      observer.reported(entry->record, reported.by_id);
}

Status Iteration::apply(const Outcome& outcome, Nanoseconds now) {
  parts_.settings.use(outcome.settings);
  refuse(outcome.refusals);
  for (const Plan& plan : outcome.plans) {
    SIRTAKI_TRY(parts_.execution.start(plan, now));
    if (plan.tensors.front().signature->deadline) parts_.deadline_monitor.note_round(plan);
  }
  settle_sets(outcome);
  for (const Stall& stall : outcome.stalls) parts_.deadline_monitor.report(stall);
  if (outcome.is_asked) parts_.negotiation.negotiator().answer(describe_wait());
  return Status::ok();
}

// Ends refused operations. Of a mismatch the records keep the program's stack, too: a rank that waits for the operation
// is at the line of its call.
void Iteration::refuse(const std::vector<Refusal>& refusals) {
  const auto is_mismatch = [](const Refusal& refusal) { return refusal.status.code() == SRT_MISMATCH; };
  StackSample stack;
  if (std::any_of(refusals.begin(), refusals.end(), is_mismatch)) stack = parts_.program_stack.sample();
  for (const Refusal& refusal : refusals) {
    const Access state(parts_.state);
    if (const HandleEntry* entry = state->handles.open_entry(refusal.ticket); entry && is_mismatch(refusal))
      state->observer.refused(entry->record, {refusal.status.text(), stack.frames});
    state->end_refused(refusal.ticket, refusal.status);
  }
}

// Applies process sets that were added or removed, and joins that are complete.
void Iteration::settle_sets(const Outcome& outcome) {
  if (outcome.process_sets.empty() && outcome.joins.empty()) return;
  const Access state(parts_.state);
  const auto end = [&](Ticket ticket, int64_t number) {
    if (HandleEntry* entry = state->handles.open_entry(ticket)) entry->number = number;
    state->handles.end(ticket, Status::ok());
  };
  for (const ProcessSetChange& change : outcome.process_sets) {
    if (change.members.empty()) state->sets.remove(change.process_set);
    else state->sets.add(change.process_set, change.members);
    end(change.ticket, change.process_set);
  }
  for (const JoinDone& join : outcome.joins) {
    if (ProcessSetEntry* set = state->sets.find(join.process_set)) set->is_joined = false;
    end(join.ticket, join.last_rank);
  }
}

// Describes this rank for a peer's stall report. A pending operation counts as waited-for only if the program is inside
// sirtaki, or its stack is unknown.
StalledRankReport Iteration::describe_wait() {
  StackSample stack = parts_.program_stack.sample();
  StalledRankReport own{parts_.own.rank, true, {}, std::move(stack.frames)};
  if (!stack.is_in_sirtaki && stack.is_known) return own;
  if (!parts_.execution.executor().is_idle()) return own;  // the program may wait for an operation that moves
  const Access state(parts_.state);
  own.waits_for = state->oldest_unplanned();
  return own;
}

bool Iteration::must_run_again() {
  if (parts_.intake.has_work()) return true;
  if (parts_.pending_abort.is_requested() && !parts_.failure.has_happened()) return true;
  if (parts_.links.has_inbound() || parts_.link_intake.has_news()) return true;
  return run(now());
}

bool Iteration::has_work_left(Nanoseconds now) const {
  return is_busy() || polls_links() || parts_.negotiation.negotiator().report_due() <= now || links_signalled_ ||
         parts_.links.has_inbound() || parts_.links.has_outbound() || parts_.link_intake.has_news() ||
         parts_.intake.has_work();
}

Nanoseconds Iteration::device_awaited_for(Nanoseconds now) const {
  const bool is_awaited = parts_.intake.awaits_inputs() || parts_.execution.executor().must_be_polled();
  return is_awaited ? now - moved_at_ : -1;
}

// Returns whether a link has to be polled. After a failure nobody waits for its bytes any more.
bool Iteration::polls_links() const {
  return !parts_.failure.has_happened() && parts_.links.must_poll(is_in_operation());
}

Nanoseconds Iteration::next_due(Nanoseconds now) const {
  Nanoseconds due = std::min({parts_.negotiation.next_due(), parts_.peer_monitor.next_due(),
                              parts_.pending_abort.next_due(), now + longest_sleep});
  // A device, or a link over MPI, is polled after a sixteenth of the time waited so far.
  if (device_awaited_for(now) >= 0 || polls_links())
    due = std::min(due, now + std::clamp((now - moved_at_) / 16, shortest_look, longest_look));
  // A full ring does not signal when it has room again; a socket does.
  if (parts_.links.rings_have_outbound()) due = std::min(due, now + milliseconds(1));
  return due;
}

}  // namespace sirtaki
