#include "context/engine.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <new>

#include "base/machine.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds between_looks = milliseconds(50);     // at deadlines and neighbours, while busy
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
    parts_.sleeper.ring_engine();
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

Engine::Nudge Engine::submit(const Ticket* handles, int32_t count) {
  const bool is_first = submissions_.empty();
  const int64_t before = submitted_bytes_;
  for (int32_t i = 0; i < count; ++i) {
    const HandleEntry& entry = *parts_.handles.open_entry(handles[i]);
    if (!entry.has_turn) continue;
    submissions_.push_back(handles[i]);
    submitted_bytes_ += entry.signature->bytes();
  }
  has_submissions_.store(true, std::memory_order_seq_cst);
  if (before < report_bytes_ && submitted_bytes_ >= report_bytes_) return Nudge::wake;
  return is_first ? Nudge::arm_window : Nudge::none;
}

void Engine::nudge(Nudge nudge) {
  if (nudge == Nudge::wake) parts_.sleeper.wake();
  if (nudge == Nudge::arm_window) parts_.sleeper.set_timer(report_window_);
}

void Engine::flush() {
  flush_wanted_.store(true, std::memory_order_seq_cst);
  parts_.sleeper.wake();
}

bool Engine::wait(const std::function<bool()>& done, Nanoseconds deadline) {
  parts_.sleeper.set_timer(never);  // before the flush, which then covers whatever the timer was for
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
    parts_.sleeper.wake();  // a sleeping driver has a flush to make
    parts_.handles.wait(lock, std::min(left, milliseconds(100)));
    if (done()) return true;
  }
}

void Engine::poll() {
  flush_wanted_.store(true, std::memory_order_seq_cst);
  if (!take_role()) {
    parts_.sleeper.wake();
    return;
  }
  parts_.sleeper.set_attention(Attention::awake);
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
    return fail(failure({SRT_OUT_OF_MEMORY, "there is no memory left"}), Tell::everyone, now);
  } catch (const std::bad_alloc&) {
    const auto lock = parts_.handles.lock();
    if (death_.status.is_ok()) death_ = {{SRT_OUT_OF_MEMORY, "no memory left"}, parts_.rank};  // needs no allocation
  }
  dead_.store(true, std::memory_order_release);
}

bool Engine::iterate(Nanoseconds now) {
  bool moved = take_submissions(now);
  moved |= take_ready(now);
  look_for_abort(now);
  if (!is_dead()) {
    news_.clear();
    const Status status = parts_.negotiation.pass(now, news_);
    if (!status.is_ok()) fail(failure(status), Tell::everyone, now);
    else act_on(news_, now);
    heed_abort(now);
    moved |= news_.moved;
  }
  if (!is_dead()) {
    const Status status = parts_.execution.advance(now, moved);
    if (!status.is_ok()) fail(failure(status), Tell::everyone, now);
  }
  if (moved) moved_at_ = now;
  if (now >= next_look_) moved |= look_around(now);
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
  std::vector<Submission> submissions;
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
    for (Submission& submission : submissions) {
      if (readiness_.must_wait(submission)) readiness_.add(std::move(submission));
      else submit_to_member(std::move(submission.request), now);
    }
  if (flush) flush_all();
  return true;
}

void Engine::flush_all() {
  parts_.negotiation.member().flush();
  readiness_.flush();
}

// Submits requests whose input a GPU has completed meanwhile.
bool Engine::take_ready(Nanoseconds now) {
  if (readiness_.is_empty()) return false;
  if (is_dead() || finished_above_ >= 0) readiness_.clear();  // their handles have ended
  Readiness::Taken taken;
  const Status status = readiness_.take(taken);
  if (!status.is_ok()) fail(failure(status), Tell::everyone, now);
  if (is_dead()) return false;
  for (Request& request : taken.requests) submit_to_member(std::move(request), now);
  if (taken.wants_flush) parts_.negotiation.member().flush();
  return !taken.requests.empty();
}

void Engine::submit_to_member(Request request, Nanoseconds now) {
  Member& member = parts_.negotiation.member();
  const Signature& signature = *request.signature;
  const bool is_there = member.members(signature.process_set) != nullptr;
  if (is_there && signature.kind == Kind::join) return member.join(signature.process_set, request.ticket, now);
  if (is_there) return member.submit(std::move(request), now);
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
    if (KnownSet* set = parts_.sets.find(join.process_set)) set->is_joined = false;
    end(join.ticket, join.last_rank);
  }
}

void Engine::act_on(News& news, Nanoseconds now) {
  if (news.has_reported || news.has_decided) observe(news, now);
  for (const Refusal& refusal : news.outcome.refusals) {
    const auto lock = parts_.handles.lock();
    end_refused(refusal.ticket, refusal.status);
  }
  for (const Plan& plan : news.outcome.plans) {
    const Status status = parts_.execution.start(plan, now);
    if (!status.is_ok()) return fail(failure(status), Tell::everyone, now);
  }
  settle_sets(news.outcome);
  for (const Stall& stall : news.outcome.stalls) parts_.watch.say(stall);
  if (news.outcome.is_asked) parts_.negotiation.member().answer(whereabouts());
  if (!news.outcome.fatal.is_ok()) return fail({news.outcome.fatal, news.outcome.culprit}, Tell::everyone, now);
  if (news.finished_above >= 0) {
    finished_above_ = news.finished_above;
    end_unplanned(nothing_is_decided());
  }
  if (news.abort) hear(*news.abort, Tell::host, now);
  for (int32_t rank : news.lost) lose(rank, now);
}

void Engine::observe(const News& news, Nanoseconds now) {
  const auto lock = parts_.handles.lock();
  Observer& observer = parts_.handles.observer();
  observer.set_moment(now);
  if (news.has_decided) observer.decision_applied();
  for (const RankLateness& late : news.outcome.lateness) observer.set_lateness(late.rank, late.lateness);
  if (!news.has_reported) return;
  for (const Member::Reported& reported : parts_.negotiation.member().reported())
    if (const HandleEntry* entry = parts_.handles.open_entry(reported.ticket))
      observer.reported(entry->record, reported.by_id);
}

void Engine::look_for_abort(Nanoseconds now) {
  if (is_dead()) return;
  if (abort_wanted_.load(std::memory_order_relaxed)) {
    std::string reason;
    {
      const auto lock = parts_.handles.lock();
      reason = abort_reason_;
    }
    const Status status{SRT_ABORTED, parts_.names[static_cast<size_t>(parts_.rank)] + " gave up: " + reason};
    return fail({status, parts_.rank, parts_.negotiation.member().last_decision()}, Tell::everyone, now);
  }
  if (!parts_.neighbours || heard_abort_) return;
  const Abort abort = parts_.neighbours->read_abort();
  if (abort.is_there)
    hear({{abort.status, printable(abort.text, abort.text.size())}, abort.rank, abort.decision}, Tell::everyone, now);
}

// Records an abort, to act on it later. An abort may overtake the Decision that made its origin give up, for instance
// because all ranks disagree: it takes another path. This rank's operations should end with what was decided.
void Engine::hear(AbortNotice notice, Tell whom, Nanoseconds now) {
  if (heard_abort_) return;
  heard_abort_ = std::move(notice);
  heard_tells_ = whom;
  heed_abort_at_ = now + last_words;
}

void Engine::heed_abort(Nanoseconds now) {
  if (!heard_abort_ || is_dead()) return;
  const bool is_behind = parts_.negotiation.member().last_decision() < heard_abort_->decision;
  if (!is_behind || now >= heed_abort_at_) fail(*heard_abort_, heard_tells_, now);
}

// Checks deadlines and deaths: now and then while busy, and always before sleep. Returns whether the links, which have
// been read before, must be read again.
bool Engine::look_around(Nanoseconds now) {
  next_look_ = now + between_looks;
  const Sleeper::Signs signs = parts_.sleeper.look();
  for (int slot : signs.deaths) lose(parts_.neighbours->rank_in(slot), now);
  if (!is_dead()) check_deadlines(now);
  return signs.of_links;
}

void Engine::check_deadlines(Nanoseconds now) {
  if (suspect_ >= 0 && now >= suspect_until_) {
    const std::string& who = parts_.names[static_cast<size_t>(suspect_)];
    constexpr char how[] =
        "its process ended, or the connection to it broke, without a goodbye. Its own output says why";
    return fail({{SRT_PEER_LOST, format("%s was lost: %s", who.c_str(), how)}, suspect_}, Tell::everyone, now);
  }
  if (const int32_t gone = finished_but_awaited(); gone >= 0) lose(gone, now);
  if (const auto silent = parts_.heartbeat.check(now)) return fail(*silent, Tell::everyone, now);
  const auto late = parts_.watch.check(now, parts_.execution, parts_.execution.executor(), parts_.negotiation,
                                       [this] { return oldest_waiting(); });
  if (late) fail(*late, Tell::everyone, now);
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
void Engine::lose(int32_t rank, Nanoseconds now) {
  if (is_dead() || suspect_ >= 0) return;
  look_for_abort(now);
  heed_abort(now);
  if (is_dead() || heard_abort_) return;
  suspect_ = rank;
  const bool is_neighbour = parts_.neighbours && parts_.neighbours->slot_of(rank) >= 0;
  suspect_until_ = is_neighbour ? now + 1 : now + last_words;
  next_look_ = std::min(next_look_, suspect_until_);
}

Status Engine::nothing_is_decided() const {
  const std::string& who = parts_.names[static_cast<size_t>(finished_above_)];
  return {SRT_PEER_FINISHED, who + " has finished and cannot take part"};
}

// Describes this rank for a peer's stall report. A pending operation counts as waited-for only if the program is inside
// sirtaki, or its stack is unknown.
Whereabouts Engine::whereabouts() {
  StackSample stack = parts_.program_stack.sample();
  Whereabouts own{parts_.rank, true, {}, std::move(stack.frames)};
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
