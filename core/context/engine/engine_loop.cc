#include "context/engine/engine_loop.h"

#include <sched.h>

#include <algorithm>

#include "base/system/thread.h"

namespace sirtaki {

EngineLoop::~EngineLoop() {
  if (!is_forked_) stop_thread();
  else if (thread_.joinable()) thread_.detach();  // the parent's thread; it does not exist here
}

void EngineLoop::start_thread() {
  thread_ = sirtaki::start_thread([this] { run(); });
}

void EngineLoop::stop_thread() {
  is_stopping_ = true;
  if (!thread_.joinable()) return;
  parts_.event_waiter.ring_engine();
  thread_.join();
}

bool EngineLoop::wait(Condition done, Nanoseconds deadline) {
  parts_.intake.want_flush();
  for (;;) {
    if (parts_.role.try_take()) {
      drive(done, deadline, false);
      leave();
    }
    Access state(parts_.state);
    if (done(*state)) return true;
    const Nanoseconds left = deadline == never ? seconds(1) : deadline - now();
    if (left <= 0) return false;
    parts_.event_waiter.wake();  // the driver may sleep, and has to flush
    state->handles.wait(state, std::min(left, milliseconds(100)));
    if (done(*state)) return true;
  }
}

void EngineLoop::poll() {
  if (!parts_.role.try_take()) return parts_.intake.flush();
  parts_.intake.want_flush();
  parts_.event_waiter.set_attention(Attention::awake);
  parts_.iteration.run(now());
  leave();
}

bool EngineLoop::drive(Condition done, Nanoseconds deadline, bool is_engine) {
  polling_.set_spin(parts_.settings.in_use(Knob::spin));
  parts_.event_waiter.set_attention(Attention::awake);
  if (is_engine) parts_.peer_monitor.check_soon();  // to find out what has woken the thread
  Nanoseconds moment = now(), busy_at = 0;
  for (bool look = true;;) {
    const bool was_in_operation = parts_.iteration.is_in_operation();
    const bool moved = parts_.iteration.run(moment);
    if (moved || look) {
      look = false;
      busy_at = moment;
      const Access state(parts_.state);
      if (!is_engine && state->handles.has_completions()) parts_.event_waiter.ring_engine();
      if (done(*state)) return true;
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
    moment = sleep(deadline, moment);
    look = true;
  }
}

// Returns whether a driver that has made no progress since `busy_at` polls again at once.
bool EngineLoop::polls(Nanoseconds moment, Nanoseconds busy_at, bool is_engine) const {
  const bool in_operation = parts_.iteration.is_in_operation();
  const Nanoseconds patience = polling_.patience(in_operation, moment);
  if (parts_.iteration.device_awaited_for(moment) >= patience) return false;
  // Native callers wait for their hooks; a caller whose hook has just run will soon submit its next operation.
  const bool for_hooks =
      is_engine && (parts_.signals.hooks.load(std::memory_order_relaxed) > 0 || moment - hooked_at_ < patience);
  return (!is_engine || for_hooks || in_operation) && moment - busy_at < patience;
}

// Pauses between two polls and returns the time. Yielding costs a system call if no thread waits for this core.
Nanoseconds EngineLoop::relax(Nanoseconds moment, Nanoseconds idle_for, bool is_engine) {
  const bool yields = polling_.yields(idle_for, moment, is_engine);
  if (yields) sched_yield();
#if defined(__x86_64__)
  else __builtin_ia32_pause();
#endif
  const Nanoseconds after = now();
  if (yields && !is_engine) polling_.yielded(moment, after);
  return after;
}

// Sleeps in a caller's thread, unless work arrived before the peers could see that it sleeps. Returns the time.
Nanoseconds EngineLoop::sleep(Nanoseconds deadline, Nanoseconds moment) {
  parts_.event_waiter.set_attention(Attention::waiter_sleeps);
  if (!parts_.iteration.must_run_again())
    parts_.event_waiter.waiter_sleep(std::min(deadline, parts_.iteration.next_due(moment)));
  parts_.event_waiter.set_attention(Attention::awake);
  parts_.peer_monitor.check_soon();
  return now();
}

// Gives up the driver's role. Another waiting caller, or else the engine's thread, takes over the remaining work.
void EngineLoop::leave() {
  if (parts_.iteration.must_read_links()) parts_.iteration.run(now());
  if (parts_.local_peers) parts_.local_peers->ring_all();
  parts_.event_waiter.set_attention(parts_.iteration.is_busy() ? Attention::engine_sleeps : Attention::idle);
  // Reports held for late ranks need the engine later.
  if (parts_.negotiation.relay_due() != never)
    parts_.event_waiter.set_timer(std::max<Nanoseconds>(parts_.negotiation.next_due() - now(), 1));
  const bool work_left = parts_.iteration.has_work_left(now());
  parts_.role.give_up();
  parts_.event_waiter.rearm();
  const Access state(parts_.state);
  state->handles.wake_waiters();
  if (state->handles.has_completions() || (work_left && !state->handles.waiters())) parts_.event_waiter.ring_engine();
}

// The body of the engine's own thread.
void EngineLoop::run() {
  while (!is_stopping_) {
    const Nanoseconds until = drive_if_free();
    if (run_hooks()) hooked_at_ = now();
    else if (until && !is_stopping_) parts_.event_waiter.engine_sleep(until);
  }
}

// Drives unless a caller does. Returns the time until which the engine's thread may sleep.
Nanoseconds EngineLoop::drive_if_free() {
  if (parts_.role.try_take()) return drive_in_thread();
  parts_.event_waiter.disarmed();
  if (parts_.role.try_take()) return drive_in_thread();  // the former driver may have left before it saw the flag
  return now() + Iteration::longest_sleep;
}

Nanoseconds EngineLoop::drive_in_thread() {
  const auto is_over = [this](CallerState& state) {
    return is_stopping_.load(std::memory_order_relaxed) || state.handles.has_completions();
  };
  if (drive(is_over, never, true) && parts_.local_peers) parts_.local_peers->ring_all();
  parts_.event_waiter.set_attention(parts_.iteration.is_in_operation() ? Attention::engine_sleeps : Attention::idle);
  const Nanoseconds until = parts_.iteration.must_run_again() ? 0 : parts_.iteration.next_due(now());
  parts_.role.give_up();
  parts_.event_waiter.disarmed();
  parts_.event_waiter.rearm();
  const Access state(parts_.state);
  state->handles.wake_waiters();
  return until;
}

bool EngineLoop::run_hooks() {
  std::vector<Completion> completions;
  {
    const Access state(parts_.state);
    completions = state->handles.take_completions();
  }
  for (const Completion& done : completions) done.hook(done.user, done.status.code(), done.error.c_str());
  return !completions.empty();
}

}  // namespace sirtaki
