// The engine's loop: when a driver polls, when it sleeps, and how it hands over the role.
#include <sched.h>

#include <algorithm>

#include "context/engine.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds longest_sleep = seconds(1);  // deadlines are checked at least this often
constexpr Nanoseconds shortest_look = microseconds(50), longest_look = milliseconds(1);  // between looks at a GPU

// Returns the polling interval of a device, which rings no doorbell: a sixteenth of the time waited so far.
Nanoseconds between_looks_at_device(Nanoseconds idle_for) {
  return std::clamp(idle_for / 16, shortest_look, longest_look);
}

}  // namespace

bool Engine::drive(const std::function<bool()>& done, Nanoseconds deadline, bool is_engine) {
  parts_.event_waiter.set_attention(Attention::awake);
  if (is_engine) next_look_ = 0;  // check_peers() then sees what has woken its thread
  Nanoseconds moment = now(), busy_at = 0;
  for (bool look = true;;) {
    const bool was_in_operation = !parts_.execution.executor().is_idle();
    const bool moved = pass(moment);
    if (moved || look) {
      look = false;
      busy_at = moment;
      const auto lock = parts_.handles.lock();
      if (!is_engine && parts_.handles.has_completions()) parts_.event_waiter.ring_engine();
      if (done()) return true;
    }
    if (moment >= deadline) return false;
    if (moved) {
      busy_at = now();
      if (was_in_operation) polling_.moved(moment, busy_at);
      else polling_.began(busy_at);
      moment = busy_at;
    }
    if (parts_.local_peers) parts_.local_peers->ring_due(moment);
    if (moved) continue;
    if (polls(moment, busy_at, is_engine)) {
      moment = relax(moment, moment - busy_at, is_engine);
      continue;
    }
    if (parts_.local_peers) parts_.local_peers->ring_all();
    if (is_engine) return false;  // it sleeps without the driver's role
    parts_.event_waiter.set_attention(Attention::waiter_sleeps);
    if (!must_not_sleep()) parts_.event_waiter.waiter_sleep(std::min(deadline, next_due(moment)));
    parts_.event_waiter.set_attention(Attention::awake);
    next_look_ = 0;
    look = true;
    moment = now();
  }
}

// Returns whether a driver that has seen nothing move since `busy_at` polls again at once.
bool Engine::polls(Nanoseconds moment, Nanoseconds busy_at, bool is_engine) const {
  const bool in_operation = !parts_.execution.executor().is_idle();
  const Nanoseconds patience = polling_.patience(in_operation);
  if (awaits_device() && moment - moved_at_ >= patience) return false;
  // Native callers wait for their hooks; a caller whose hook has just run soon submits its next operation.
  const bool for_hooks = is_engine && (parts_.handles.awaits_hooks() || moment - hooked_at_ < patience);
  return (!is_engine || for_hooks || in_operation) && moment - busy_at < patience;
}

// Pauses between two polls and returns the time. Yielding costs a system call if no thread waits for this core.
Nanoseconds Engine::relax(Nanoseconds moment, Nanoseconds idle_for, bool is_engine) {
  const bool yields = polling_.yields(idle_for, moment, is_engine);
  if (yields) sched_yield();
#if defined(__x86_64__)
  else __builtin_ia32_pause();
#endif
  const Nanoseconds after = now();
  if (yields && !is_engine) polling_.yielded(moment, after);
  return after;
}

Nanoseconds Engine::next_due(Nanoseconds moment) const {
  Nanoseconds due = std::min(parts_.negotiation.next_due(), moment + longest_sleep);
  if (awaits_device()) due = std::min(due, moment + between_looks_at_device(moment - moved_at_));
  if (suspect_ >= 0 && !is_dead()) due = std::min(due, suspect_until_);
  if (received_abort_ && !is_dead()) due = std::min(due, abort_due_at_);
  // A full ring does not signal when it has room again; sockets do.
  if (parts_.links.rings_have_outbound()) due = std::min(due, moment + milliseconds(1));
  return due;
}

bool Engine::awaits_device() const {
  return !input_readiness_.is_empty() || parts_.execution.executor().must_be_polled();
}

// Checks for work that arrived between the last pass and the note that this rank sleeps.
bool Engine::must_not_sleep() {
  if (has_submissions_.load(std::memory_order_seq_cst) || flush_wanted_.load(std::memory_order_seq_cst)) return true;
  if (abort_wanted_.load(std::memory_order_seq_cst) && !is_dead()) return true;
  if (parts_.links.has_inbound()) return true;
  return pass(now());
}

// Gives up the driver's role. Another caller that waits, else the engine's thread, continues with what is left.
void Engine::leave() {
  if (parts_.local_peers) parts_.local_peers->ring_all();
  const bool busy = !parts_.execution.executor().is_idle() || !input_readiness_.is_empty();
  parts_.event_waiter.set_attention(busy ? Attention::engine_sleeps : Attention::idle);
  // Reports held for late ranks need the engine later. A thread that submits after the check of submissions below arms
  // the timer anew.
  if (parts_.negotiation.relay_due() != never)
    parts_.event_waiter.set_timer(std::max<Nanoseconds>(parts_.negotiation.next_due() - now(), 1));
  const bool work_left = busy || parts_.negotiation.negotiator().report_due() <= now() || parts_.links.has_inbound() ||
                         parts_.links.has_outbound() || flush_wanted_.load(std::memory_order_seq_cst) ||
                         has_submissions_.load(std::memory_order_seq_cst);
  driver_.unlock();
  parts_.event_waiter.rearm();
  const auto lock = parts_.handles.lock();
  parts_.handles.wake_waiters();
  if (parts_.handles.has_completions() || (work_left && !parts_.handles.waiters())) parts_.event_waiter.ring_engine();
}

void Engine::run() {
  const auto is_over = [this] { return stopping_.load(std::memory_order_relaxed) || parts_.handles.has_completions(); };
  while (!stopping_) {
    bool is_driver = driver_.try_lock();
    if (!is_driver) {
      parts_.event_waiter.disarmed();
      is_driver = driver_.try_lock();  // the driver may have left before it could see the flag
    }
    Nanoseconds until = now() + longest_sleep;
    if (is_driver) {
      if (drive(is_over, never, true) && parts_.local_peers) parts_.local_peers->ring_all();
      parts_.event_waiter.set_attention(parts_.execution.executor().is_idle() ? Attention::idle
                                                                              : Attention::engine_sleeps);
      if (must_not_sleep()) until = 0;
      else until = next_due(now());
      driver_.unlock();
      parts_.event_waiter.disarmed();
      parts_.event_waiter.rearm();
      const auto lock = parts_.handles.lock();
      parts_.handles.wake_waiters();
    }
    if (run_completions()) hooked_at_ = now();
    else if (until && !stopping_) parts_.event_waiter.engine_sleep(until);
  }
}

// Runs native callers' hooks: on the engine's own thread, without the driver's role or any lock.
bool Engine::run_completions() {
  std::vector<Completion> completions;
  {
    const auto lock = parts_.handles.lock();
    completions = parts_.handles.take_completions();
  }
  for (const Completion& done : completions) done.hook(done.user, done.status.code(), done.error.c_str());
  return !completions.empty();
}

}  // namespace sirtaki
