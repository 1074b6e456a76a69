#include "context/engine/shutdown.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace sirtaki {
namespace {

constexpr Nanoseconds longest_operations = seconds(30);  // after a failure

// For goodbyes and failures, to machines that may have failed.
constexpr Nanoseconds shortest_delivery = milliseconds(200), longest_delivery = seconds(1);

// Time after the barrier for Decisions: a coordinator that batches tensors while plans are in flight may decide late.
constexpr Nanoseconds last_decisions = milliseconds(300);

// Returns whether all operations but the barrier have ended; operations without a plan only count if
// `counts_unplanned`.
bool has_ended(CallerState& state, Ticket barrier, bool counts_unplanned) {
  const std::vector<Ticket> unfinished = state.handles.unfinished();
  return std::all_of(unfinished.begin(), unfinished.end(), [&](Ticket ticket) {
    const bool is_planned = state.handles.open_entry(ticket)->state == HandleState::planned;
    return ticket == barrier || !(counts_unplanned || is_planned);
  });
}

}  // namespace

bool Shutdown::run(Nanoseconds deadline, Ticket all_here) {
  if (has_begun_.exchange(true)) return false;
  if (!parts_.failure.has_happened()) drain(deadline, all_here);
  parts_.loop.stop_thread();
  const DriverRole::Scope scope(parts_.role);
  end_all(deadline);
  return true;
}

// Waits until nothing is in flight, or only operations that some rank has not submitted and never will, because all
// ranks are shutting down.
void Shutdown::drain(Nanoseconds deadline, Ticket all_here) {
  Nanoseconds quiet_since = never;
  const auto nothing_can_come = [&](CallerState& state) {
    const HandleEntry* barrier = state.handles.find(all_here);
    const bool is_quiet =
        barrier && barrier->is_finished() && barrier->status.is_ok() && has_ended(state, all_here, false);
    quiet_since = is_quiet ? std::min(quiet_since, now()) : never;
    return is_quiet && now() - quiet_since >= last_decisions;
  };
  parts_.loop.wait([&](CallerState& state) { return has_ended(state, all_here, true) || nothing_can_come(state); },
                   deadline);
}

void Shutdown::end_all(Nanoseconds deadline) {
  EngineFailure& failure = parts_.failure;
  LocalPeers* local_peers = parts_.own.local_peers;
  if (!failure.has_happened()) serve_others(deadline);
  if (!failure.has_happened()) deliver_polled(std::max(deadline, now() + shortest_delivery));
  const Nanoseconds last_call = std::max(deadline, now() + shortest_delivery);
  // A failure is sent quickly or not at all: the failed machine may accept no more bytes.
  const Nanoseconds end_of_words = failure.has_happened() ? std::min(last_call, now() + longest_delivery) : last_call;
  // Operations end soon after a failure; until then, the caller's memory may still be written.
  const Nanoseconds end_of_operations =
      failure.has_happened() ? std::max(deadline, now() + longest_operations) : last_call;
  if (!failure.has_happened()) {
    if (local_peers) local_peers->say_goodbye();
    parts_.negotiation.say_goodbye(now());
    const Status status{SRT_SHUT_DOWN, "sirtaki was shut down on this rank before the operation ended"};
    failure.fail({status, parts_.own.rank}, AbortScope::nobody, now());
  }
  // Peers may not have read everything yet: flush until it is sent, or time is up.
  while ((parts_.links.has_outbound() && now() < end_of_words) ||
         (!failure.has_ended_all() && now() < end_of_operations)) {
    parts_.iteration.run(now());
    sched_yield();
  }
  deliver(end_of_words);
  if (local_peers) local_peers->wake_everyone();
  parts_.loop.run_hooks();
  if (failure.has_ended_all()) close();
}

// Closes the links. The context exists as long as a result or an error of it is held; its peers' descriptors need
// not.
void Shutdown::close() {
  parts_.role.close();
  if (parts_.own.local_peers) parts_.own.local_peers->close();
  parts_.links.close();
}

// Waits until peers have received what MPI moves, which it does only while this rank calls it. A peer takes a goodbye
// as the end of the bytes that it may wait for.
void Shutdown::deliver_polled(Nanoseconds deadline) {
  while (!parts_.failure.has_happened() && parts_.links.must_poll(false) && now() < deadline) {
    const bool moved = parts_.iteration.run(now());
    if (parts_.own.local_peers) parts_.own.local_peers->ring_all();
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Waits for delivery: closing a connection with unread bytes discards sent bytes that have not arrived yet.
void Shutdown::deliver(Nanoseconds deadline) {
  parts_.links.end_writing();
  deadline = std::min(deadline, now() + longest_delivery);
  while (!parts_.links.are_delivered() && now() < deadline) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

// Returns the ranks of process sets that this rank does not belong to, if they negotiate through this rank.
std::vector<int32_t> Shutdown::others_below() {
  std::vector<int32_t> others;
  {
    const Access state(parts_.state);
    others = state->sets.ranks_without(parts_.own.rank);
  }
  const std::vector<int32_t>& below = parts_.negotiation.subtree();
  std::erase_if(others, [&](int32_t rank) { return !std::binary_search(below.begin(), below.end(), rank); });
  return others;
}

// Serves process sets that this rank does not belong to: they may continue without it, but not without the Decisions
// that it makes or forwards.
void Shutdown::serve_others(Nanoseconds deadline) {
  const std::vector<int32_t> others = others_below();
  if (others.empty()) return;
  parts_.negotiation.leave(now());
  const auto all_have_left = [&] {
    return std::all_of(others.begin(), others.end(), [&](int32_t rank) { return parts_.negotiation.has_left(rank); });
  };
  while (!parts_.failure.has_happened() && !parts_.intake.is_closed() && !all_have_left() && now() < deadline) {
    const bool moved = parts_.iteration.run(now());
    if (parts_.own.local_peers) parts_.own.local_peers->ring_all();  // they may sleep until a doorbell rings
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace sirtaki
