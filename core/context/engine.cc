#include "context/engine.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <new>

#include "base/machine.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds between_looks = milliseconds(50);     // at deadlines and local peers, while busy
constexpr Nanoseconds last_words = milliseconds(200);  // time to wait for a lost rank's own reason, or for a Decision

}  // namespace

Engine::Engine(const EngineParts& parts, const Config& config, int ranks_on_this_host)
    : parts_(parts), report_bytes_(config.integer(Knob::report_bytes)),
      report_window_(config.time(Knob::report_window)),
      polling_(config.time(Knob::spin), ranks_on_this_host > usable_cores()) {}

Engine::~Engine() {
  if (forked_) {
    thread_.detach();  // the parent's thread; it does not exist here
    return;
  }
  stopping_ = true;
  if (thread_.joinable()) {
    parts_.event_waiter.ring_engine();
    thread_.join();
  }
}

void Engine::start_thread() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// ---- Callers -----------------------------------------------------------------------------------------------

Engine::WakeHint Engine::submit(const Ticket* handles, int32_t count) {
  const bool is_first = submissions_.empty();
  const int64_t before = submitted_bytes_;
  for (int32_t i = 0; i < count; ++i) {
    const HandleEntry& entry = *parts_.handles.open_entry(handles[i]);
    if (!entry.has_turn) continue;
    submissions_.push_back(handles[i]);
    submitted_bytes_ += entry.signature->bytes();
  }
  has_submissions_.store(true, std::memory_order_seq_cst);
  if (before < report_bytes_ && submitted_bytes_ >= report_bytes_) return WakeHint::wake;
  return is_first ? WakeHint::arm_window : WakeHint::none;
}

void Engine::deliver_hint(WakeHint hint) {
  if (hint == WakeHint::wake) parts_.event_waiter.wake();
  if (hint == WakeHint::arm_window) parts_.event_waiter.set_timer(report_window_);
}

void Engine::flush() {
  flush_wanted_.store(true, std::memory_order_seq_cst);
  parts_.event_waiter.wake();
}

bool Engine::wait(const std::function<bool()>& done, Nanoseconds deadline) {
  parts_.event_waiter.set_timer(never);  // before the flush, which then covers whatever the timer was for
  flush_wanted_.store(true, std::memory_order_seq_cst);
  for (;;) {
    if (take_role()) {
      drive(done, deadline, false);
      leave();
    }
    auto lock = parts_.handles.lock();
    if (done()) return true;
    const Nanoseconds left = deadline == never ? seconds(1) : deadline - now();
    if (left <= 0) return false;
    parts_.event_waiter.wake();  // a sleeping driver has a flush to make
    parts_.handles.wait(lock, std::min(left, milliseconds(100)));
    if (done()) return true;
  }
}

void Engine::poll() {
  flush_wanted_.store(true, std::memory_order_seq_cst);
  if (!take_role()) {
    parts_.event_waiter.wake();
    return;
  }
  parts_.event_waiter.set_attention(Attention::awake);
  pass(now());
  leave();
}

void Engine::abort(std::string reason) {
  {
    const auto lock = parts_.handles.lock();
    if (abort_reason_.empty()) abort_reason_ = std::move(reason);
  }
  abort_wanted_.store(true, std::memory_order_seq_cst);
  wait([this] { return is_dead() && !parts_.handles.any_unfinished(); }, now() + seconds(2));
}

AbortNotice Engine::death() const {
  const auto lock = parts_.handles.lock();
  return death_;
}

// ---- The driver --------------------------------------------------------------------------------------------

bool Engine::take_role() {
  if (!driver_.try_lock()) return false;
  if (!closed_) return true;
  driver_.unlock();
  return false;
}

bool Engine::pass(Nanoseconds now) {
  try {
    return iterate(now);
  } catch (const std::bad_alloc&) {
    fail_without_memory(now);
    return false;
  }
}

// Fails the context. The interrupted iteration has freed its memory, so there is usually room for the text for all
// ranks.
void Engine::fail_without_memory(Nanoseconds now) {
  try {
    return fail(failure({SRT_OUT_OF_MEMORY, "there is no memory left"}), AbortScope::everyone, now);
  } catch (const std::bad_alloc&) {
    const auto lock = parts_.handles.lock();
    if (death_.status.is_ok()) death_ = {{SRT_OUT_OF_MEMORY, "no memory left"}, parts_.rank};  // needs no allocation
  }
  dead_.store(true, std::memory_order_release);
}

bool Engine::iterate(Nanoseconds now) {
  bool moved = take_submissions(now);
  moved |= take_ready(now);
  poll_shared_abort(now);
  if (!is_dead()) {
    events_.clear();
    const Status status = parts_.negotiation.pass(now, events_);
    if (!status.is_ok()) fail(failure(status), AbortScope::everyone, now);
    else act_on(events_, now);
    act_on_abort(now);
    moved |= events_.moved;
  }
  if (!is_dead()) {
    const Status status = parts_.execution.advance(now, moved);
    if (!status.is_ok()) fail(failure(status), AbortScope::everyone, now);
  }
  if (moved) moved_at_ = now;
  if (now >= next_look_) moved |= check_peers(now);
  if (is_dead()) {
    end_all_when_quiet();
    parts_.negotiation.flush_links(now);
  }
  return moved;
}

bool Engine::take_submissions(Nanoseconds now) {
  const bool turns = parts_.handles.has_turns();
  // Read before the submissions: a thread that wants a flush has submitted before.
  const bool flush = (flush_wanted_.load(std::memory_order_seq_cst) && flush_wanted_.exchange(false)) || turns;
  if (!turns && !has_submissions_.load(std::memory_order_seq_cst)) {
    if (flush) flush_all();
    return false;
  }
  std::vector<QueuedRequest> submissions;
  {
    const auto lock = parts_.handles.lock();
    taken_.clear();
    taken_.swap(submissions_);
    submitted_bytes_ = 0;
    has_submissions_.store(false, std::memory_order_seq_cst);
    for (Ticket next : parts_.handles.take_turns()) taken_.push_back(next);
    for (Ticket handle : taken_)
      if (const HandleEntry* entry = parts_.handles.open_entry(handle))
        submissions.push_back({{entry->signature, handle, entry->absent}, entry->ready});
  }
  if (is_dead()) return true;
  if (finished_above_ >= 0) end_unplanned(nothing_is_decided());
  else
    for (QueuedRequest& submission : submissions) {
      if (input_readiness_.must_wait(submission)) input_readiness_.add(std::move(submission));
      else submit_to_member(std::move(submission.request), now);
    }
  if (flush) flush_all();
  return true;
}

void Engine::flush_all() {
  parts_.negotiation.negotiator().flush();
  input_readiness_.flush();
}

// Submits requests whose input a GPU has completed meanwhile.
bool Engine::take_ready(Nanoseconds now) {
  if (input_readiness_.is_empty()) return false;
  if (is_dead() || finished_above_ >= 0) input_readiness_.clear();  // their handles have ended
  InputReadiness::Taken taken;
  const Status status = input_readiness_.take(taken);
  if (!status.is_ok()) fail(failure(status), AbortScope::everyone, now);
  if (is_dead()) return false;
  for (Request& request : taken.requests) submit_to_member(std::move(request), now);
  if (taken.wants_flush) parts_.negotiation.negotiator().flush();
  return !taken.requests.empty();
}

void Engine::submit_to_member(Request request, Nanoseconds now) {
  Negotiator& negotiator = parts_.negotiation.negotiator();
  const Signature& signature = *request.signature;
  const bool is_there = negotiator.members(signature.process_set) != nullptr;
  if (is_there && signature.kind == Kind::join) return negotiator.join(signature.process_set, request.ticket, now);
  if (is_there) return negotiator.submit(std::move(request), now);
  // The set was removed since the caller submitted.
  const auto lock = parts_.handles.lock();
  const std::string text = format("process set %d was removed before '%s' took place", signature.process_set,
                                  printable(signature.name, 200).c_str());
  parts_.handles.end(request.ticket, {SRT_INVALID_ARGUMENT, text});
}

// Applies process sets that were added or removed, and joins that are complete.
void Engine::settle_sets(const Outcome& outcome) {
  if (outcome.process_sets.empty() && outcome.joins.empty()) return;
  const auto lock = parts_.handles.lock();
  const auto end = [&](Ticket ticket, int64_t number) {
    if (HandleEntry* entry = parts_.handles.open_entry(ticket)) entry->number = number;
    parts_.handles.end(ticket, Status::ok());
  };
  for (const ProcessSetChange& change : outcome.process_sets) {
    if (change.members.empty()) parts_.sets.remove(change.process_set);
    else parts_.sets.add(change.process_set, change.members);
    end(change.ticket, change.process_set);
  }
  for (const JoinDone& join : outcome.joins) {
    if (ProcessSetEntry* set = parts_.sets.find(join.process_set)) set->is_joined = false;
    end(join.ticket, join.last_rank);
  }
}

void Engine::act_on(NegotiationEvents& events, Nanoseconds now) {
  if (events.has_reported || events.has_decided) observe(events, now);
  for (const Refusal& refusal : events.outcome.refusals) {
    const auto lock = parts_.handles.lock();
    end_refused(refusal.ticket, refusal.status);
  }
  for (const Plan& plan : events.outcome.plans) {
    const Status status = parts_.execution.start(plan, now);
    if (!status.is_ok()) return fail(failure(status), AbortScope::everyone, now);
  }
  settle_sets(events.outcome);
  for (const Stall& stall : events.outcome.stalls) parts_.deadline_monitor.report(stall);
  if (events.outcome.is_asked) parts_.negotiation.negotiator().answer(describe_wait());
  if (!events.outcome.fatal.is_ok())
    return fail({events.outcome.fatal, events.outcome.culprit}, AbortScope::everyone, now);
  if (events.finished_above >= 0) {
    finished_above_ = events.finished_above;
    end_unplanned(nothing_is_decided());
  }
  if (events.abort) receive_abort(*events.abort, AbortScope::host, now);
  for (int32_t rank : events.lost) handle_lost_rank(rank, now);
}

void Engine::observe(const NegotiationEvents& events, Nanoseconds now) {
  const auto lock = parts_.handles.lock();
  Observer& observer = parts_.handles.observer();
  observer.set_moment(now);
  if (events.has_decided) observer.decision_applied();
  for (const RankLateness& late : events.outcome.lateness) observer.set_lateness(late.rank, late.lateness);
  if (!events.has_reported) return;
  for (const Negotiator::Reported& reported : parts_.negotiation.negotiator().reported())
    if (const HandleEntry* entry = parts_.handles.open_entry(reported.ticket))
      observer.reported(entry->record, reported.by_id);
}

void Engine::poll_shared_abort(Nanoseconds now) {
  if (is_dead()) return;
  if (abort_wanted_.load(std::memory_order_relaxed)) {
    std::string reason;
    {
      const auto lock = parts_.handles.lock();
      reason = abort_reason_;
    }
    const Status status{SRT_ABORTED, parts_.names[static_cast<size_t>(parts_.rank)] + " gave up: " + reason};
    return fail({status, parts_.rank, parts_.negotiation.negotiator().last_decision()}, AbortScope::everyone, now);
  }
  if (!parts_.local_peers || received_abort_) return;
  const Abort abort = parts_.local_peers->read_abort();
  if (abort.is_there)
    receive_abort({{abort.status, printable(abort.text, abort.text.size())}, abort.rank, abort.decision},
                  AbortScope::everyone, now);
}

// Records an abort, to act on it later. An abort may overtake the Decision that made its origin give up, for instance
// because all ranks disagree: it takes another path. This rank's operations should end with what was decided.
void Engine::receive_abort(AbortNotice notice, AbortScope scope, Nanoseconds now) {
  if (received_abort_) return;
  received_abort_ = std::move(notice);
  received_scope_ = scope;
  abort_due_at_ = now + last_words;
}

void Engine::act_on_abort(Nanoseconds now) {
  if (!received_abort_ || is_dead()) return;
  const bool is_behind = parts_.negotiation.negotiator().last_decision() < received_abort_->decision;
  if (!is_behind || now >= abort_due_at_) fail(*received_abort_, received_scope_, now);
}

// Checks deadlines and deaths: now and then while busy, and always before sleep. Returns whether the links, which have
// been read before, must be read again.
bool Engine::check_peers(Nanoseconds now) {
  next_look_ = now + between_looks;
  const EventWaiter::WakeEvents events = parts_.event_waiter.take_events();
  for (int slot : events.deaths) handle_lost_rank(parts_.local_peers->rank_in(slot), now);
  if (!is_dead()) check_deadlines(now);
  return events.of_links;
}

void Engine::check_deadlines(Nanoseconds now) {
  if (suspect_ >= 0 && now >= suspect_until_) {
    const std::string& who = parts_.names[static_cast<size_t>(suspect_)];
    constexpr char how[] =
        "its process ended, or the connection to it broke, without a goodbye. Its own output says why";
    return fail({{SRT_PEER_LOST, format("%s was lost: %s", who.c_str(), how)}, suspect_}, AbortScope::everyone, now);
  }
  if (const int32_t gone = finished_but_awaited(); gone >= 0) handle_lost_rank(gone, now);
  if (const auto silent = parts_.heartbeat.check(now)) return fail(*silent, AbortScope::everyone, now);
  const auto late = parts_.deadline_monitor.check(now, parts_.execution, parts_.execution.executor(),
                                                  parts_.negotiation, [this] { return oldest_waiting(); });
  if (late) fail(*late, AbortScope::everyone, now);
}

// Returns a rank that has said goodbye without sending the awaited bytes; -1: none. Bytes sent just before a goodbye
// are here once it is seen, so they are looked for once more.
int32_t Engine::finished_but_awaited() const {
  const Executor& executor = parts_.execution.executor();
  std::vector<int32_t> late, still_late;
  if (!executor.stuck(late)) return -1;
  std::erase_if(late, [&](int32_t rank) { return !parts_.negotiation.has_finished(rank); });
  if (late.empty() || !executor.stuck(still_late)) return -1;
  for (int32_t rank : late)
    if (std::find(still_late.begin(), still_late.end(), rank) != still_late.end()) return rank;
  return -1;
}

// Handles the loss of a rank. A failing rank sends its reason before it exits, so the reason is awaited for a moment:
// in this host's shared memory it is there already, and the next pass reads it; from another host it may still be in
// transit.
void Engine::handle_lost_rank(int32_t rank, Nanoseconds now) {
  if (is_dead() || suspect_ >= 0) return;
  poll_shared_abort(now);
  act_on_abort(now);
  if (is_dead() || received_abort_) return;
  suspect_ = rank;
  const bool is_local = parts_.local_peers && parts_.local_peers->slot_of(rank) >= 0;
  suspect_until_ = is_local ? now + 1 : now + last_words;
  next_look_ = std::min(next_look_, suspect_until_);
}

Status Engine::nothing_is_decided() const {
  const std::string& who = parts_.names[static_cast<size_t>(finished_above_)];
  return {SRT_PEER_FINISHED, who + " has finished and cannot take part"};
}

// Describes this rank for a peer's stall report. A pending operation counts as waited-for only if the program is inside
// sirtaki, or its stack is unknown.
StalledRankReport Engine::describe_wait() {
  StackSample stack = parts_.program_stack.sample();
  StalledRankReport own{parts_.rank, true, {}, std::move(stack.frames)};
  if (stack.is_in_sirtaki || !stack.is_known) own.waits_for = oldest_waiting();
  return own;
}

std::string Engine::oldest_waiting() {
  const auto lock = parts_.handles.lock();
  const HandleEntry* oldest = nullptr;
  for (Ticket handle : parts_.handles.unfinished()) {
    const HandleEntry* entry = parts_.handles.open_entry(handle);
    if (!entry->planned && (!oldest || entry->record < oldest->record)) oldest = entry;
  }
  return oldest ? oldest->signature->name : std::string();
}

}  // namespace sirtaki
