// Watched operations: a thread that sleeps meanwhile learns of their ends, and the engine's own thread drives them.
#include <algorithm>

#include "context/context.h"

namespace sirtaki {

Status Context::watch(const Ticket* handles, int32_t count) {
  if (forked_ || !is_started()) return usable();
  const Watch until = waits_on_host_ ? Watch::until_finished : Watch::until_launched;
  {
    const Access state(state_);
    if (!std::all_of(handles, handles + count, [&](Ticket handle) { return state->handles.find(handle); }))
      return {SRT_INVALID_ARGUMENT, "there is no such handle; was it released?"};
    for (int32_t i = 0; i < count; ++i) state->handles.watch(handles[i], until);
    if (!state->handles.any_watched() || failure_->has_happened()) return Status::ok();
  }
  std::call_once(thread_started_, [this] { loop_->start_thread(); });  // a world of one rank may have none yet
  intake_->flush();
  return Status::ok();
}

Status Context::wait_watched(Ticket* out, int32_t capacity, int32_t& count, Nanoseconds timeout) {
  count = 0;
  if (forked_ || !is_started()) return usable();
  if (!out || capacity < 1) return {SRT_INVALID_ARGUMENT, "there is no room for a handle"};
  const Nanoseconds deadline = timeout < 0 ? never : now() + timeout;
  Access state(state_);
  for (;;) {
    count = state->handles.take_reports(out, capacity);
    if (count) return Status::ok();
    if (failure_->has_happened() && !state->handles.any_watched()) return failure_->notice().status;
    const Nanoseconds left = deadline == never ? seconds(1) : deadline - now();
    if (left <= 0) return {SRT_IN_PROGRESS, "still in flight"};
    state->handles.wait_for_reports(state, left);
  }
}

}  // namespace sirtaki
