#include "context/outcome_handler.h"

namespace sirtaki {

Status OutcomeHandler::apply(const NegotiationEvents& events, Nanoseconds now) {
  if (events.has_reported || events.has_decided) observe(events, now);
  for (const Refusal& refusal : events.outcome.refusals) {
    const Access state(parts_.state);
    state->end_refused(refusal.ticket, refusal.status);
  }
  for (const Plan& plan : events.outcome.plans) SIRTAKI_TRY(parts_.execution.start(plan, now));
  settle_sets(events.outcome);
  for (const Stall& stall : events.outcome.stalls) parts_.deadline_monitor.report(stall);
  if (events.outcome.is_asked) parts_.negotiator.answer(describe_wait());
  return Status::ok();
}

void OutcomeHandler::observe(const NegotiationEvents& events, Nanoseconds now) {
  const Access state(parts_.state);
  Observer& observer = state->observer;
  observer.set_moment(now);
  if (events.has_decided) observer.decision_applied();
  for (const RankLateness& late : events.outcome.lateness) observer.set_lateness(late.rank, late.lateness);
  if (!events.has_reported) return;
  for (const Negotiator::Reported& reported : parts_.negotiator.reported())
    if (const HandleEntry* entry = state->handles.open_entry(reported.ticket))
      observer.reported(entry->record, reported.by_id);
}

// Applies process sets that were added or removed, and joins that are complete.
void OutcomeHandler::settle_sets(const Outcome& outcome) {
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
StalledRankReport OutcomeHandler::describe_wait() {
  StackSample stack = parts_.program_stack.sample();
  StalledRankReport own{parts_.rank, true, {}, std::move(stack.frames)};
  if (!stack.is_in_sirtaki && stack.is_known) return own;
  const Access state(parts_.state);
  own.waits_for = state->oldest_unplanned();
  return own;
}

}  // namespace sirtaki
