#include "context/submission/intake.h"

#include "base/text.h"

namespace sirtaki {

Intake::Intake(SharedCallerState& state, HandleSignals& signals, EventWaiter& event_waiter, Negotiator& negotiator,
               LateResults& late_results, const LiveSettings& settings, const GpuBackend* gpus)
    : state_(state), signals_(signals), event_waiter_(event_waiter), negotiator_(negotiator),
      late_results_(late_results), settings_(settings), input_readiness_(gpus, negotiator) {}

Intake::WakeHint Intake::queue(const Ticket* handles, int32_t count, CallerState& state) {
  const bool is_first = state.submitted.empty();
  const int64_t before = state.submitted_bytes;
  for (int32_t i = 0; i < count; ++i) {
    const HandleEntry& entry = *state.handles.open_entry(handles[i]);
    if (entry.state == HandleState::waits_for_name) continue;
    state.submitted.push_back(handles[i]);
    state.submitted_bytes += entry.signature->bytes();
  }
  has_submissions_.store(true, std::memory_order_seq_cst);
  const int64_t enough = settings_.in_use(Knob::report_bytes);
  if (before < enough && state.submitted_bytes >= enough) return WakeHint::wake;
  return is_first ? WakeHint::arm_window : WakeHint::none;
}

void Intake::deliver_hint(WakeHint hint) {
  if (hint == WakeHint::wake) event_waiter_.wake();
  if (hint == WakeHint::arm_window) event_waiter_.set_timer(settings_.in_use(Knob::report_window));
}

void Intake::flush() {
  want_flush();
  event_waiter_.wake();
}

bool Intake::has_work() const {
  return has_submissions_.load(std::memory_order_seq_cst) || flush_wanted_.load(std::memory_order_seq_cst);
}

bool Intake::take(Nanoseconds now, bool is_dead) {
  const bool turns = signals_.has_turns.load(std::memory_order_relaxed);
  // Read before the submissions, because a thread that wants a flush has submitted before.
  const bool flush = (flush_wanted_.load(std::memory_order_seq_cst) && flush_wanted_.exchange(false)) || turns;
  if (!turns && !has_submissions_.load(std::memory_order_seq_cst)) {
    if (flush) flush_all();
    return false;
  }
  std::vector<QueuedRequest> submissions = take_submitted();
  if (is_dead) return true;
  if (is_closed()) {
    const Access state(state_);
    state->end_unplanned(closed_because_);
  } else {
    for (QueuedRequest& submission : submissions) {
      if (input_readiness_.must_wait(submission)) input_readiness_.add(std::move(submission));
      else submit(std::move(submission.request), now);
    }
  }
  if (flush) flush_all();
  return true;
}

std::vector<QueuedRequest> Intake::take_submitted() {
  std::vector<QueuedRequest> submissions;
  const Access state(state_);
  taken_.clear();
  taken_.swap(state->submitted);
  state->submitted_bytes = 0;
  has_submissions_.store(false, std::memory_order_seq_cst);
  for (Ticket next : state->handles.take_turns()) taken_.push_back(next);
  for (Ticket handle : taken_)
    if (const HandleEntry* entry = state->handles.open_entry(handle))
      submissions.push_back(
          {{entry->signature, handle, entry->is_absent}, input_readiness_.awaited_by_host(*entry, state->handles)});
  return submissions;
}

Status Intake::take_ready(Nanoseconds now, bool is_dead, bool& moved) {
  if (input_readiness_.is_empty()) return Status::ok();
  if (is_dead || is_closed()) input_readiness_.clear();  // their handles have ended
  InputReadiness::Taken taken;
  SIRTAKI_TRY(input_readiness_.take(taken));
  for (Request& request : taken.requests) submit(std::move(request), now);
  if (taken.wants_flush) negotiator_.flush();
  moved |= !taken.requests.empty();
  return Status::ok();
}

void Intake::submit(Request request, Nanoseconds now) {
  const Signature& signature = *request.signature;
  const bool is_there = negotiator_.members(signature.process_set) != nullptr;
  if (is_there && signature.kind == Kind::join) return negotiator_.join(signature.process_set, request.ticket, now);
  if (late_results_.claim(request)) return;
  if (is_there) return negotiator_.submit(std::move(request), now);
  // The set was removed since the caller submitted.
  const std::string text = format("process set %d was removed before '%s' took place", signature.process_set,
                                  printable(signature.name, 200).c_str());
  const Access state(state_);
  state->handles.end(request.ticket, {SRT_INVALID_ARGUMENT, text});
}

void Intake::flush_all() {
  negotiator_.flush();
  input_readiness_.flush();
}

void Intake::close(const Status& reason) {
  closed_because_ = reason;
  const Access state(state_);
  state->end_unplanned(reason);
}

}  // namespace sirtaki
