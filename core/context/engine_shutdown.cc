// The end of a rank's part in the job: in good order, or with a failure that is propagated to all ranks.
#include <sched.h>

#include <algorithm>
#include <chrono>

#include "context/engine.h"

namespace sirtaki {
namespace {

constexpr Nanoseconds longest_delivery = seconds(1);  // for goodbyes, to machines that may be gone

// A coordinator that batches tensors while plans move may decide after the barrier what was complete before it.
constexpr Nanoseconds last_decisions = milliseconds(300);

}  // namespace

void Engine::shutdown(Nanoseconds deadline, Ticket all_here) {
  if (shut_down_.exchange(true)) return;
  if (!is_dead()) drain(deadline, all_here);
  stopping_ = true;
  parts_.event_waiter.ring_engine();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard driver(driver_);
  if (!is_dead()) serve_others(deadline);
  const Nanoseconds last_call = std::max(deadline, now() + milliseconds(200));
  // A failure is sent quickly or not at all: the failed machine may accept no more bytes.
  const Nanoseconds end_of_words = is_dead() ? std::min(last_call, now() + longest_delivery) : last_call;
  if (!is_dead()) {
    if (parts_.local_peers) parts_.local_peers->say_goodbye();
    parts_.negotiation.say_goodbye(now());
    fail({{SRT_SHUT_DOWN, "sirtaki was shut down on this rank before the operation ended"}, parts_.rank},
         AbortScope::nobody, now());
  }
  // Peers may still read what they have not taken yet: flush until it is gone, or time is up.
  while ((parts_.links.has_outbound() && now() < end_of_words) || (!all_ended_ && now() < last_call)) {
    pass(now());
    sched_yield();
  }
  deliver(end_of_words);
  if (parts_.local_peers) parts_.local_peers->wake_everyone();
  run_completions();
  if (!all_ended_) return;
  // The context may live on for as long as a result or an error of it does; its peers' descriptors need not.
  closed_ = true;
  if (parts_.local_peers) parts_.local_peers->close();
  parts_.links.close();
}

// Waits until nothing is in flight, or only operations that some rank has not submitted and, as all are here, never
// will.
void Engine::drain(Nanoseconds deadline, Ticket all_here) {
  HandleTable& handles = parts_.handles;
  const auto has_ended = [&](bool counts_unplanned) {
    const std::vector<Ticket> unfinished = handles.unfinished();
    return std::all_of(unfinished.begin(), unfinished.end(), [&](Ticket ticket) {
      return ticket == all_here || !(counts_unplanned || handles.open_entry(ticket)->planned);
    });
  };
  Nanoseconds quiet_since = never;
  const auto nothing_can_come = [&] {
    const HandleEntry* barrier = handles.find(all_here);
    const bool is_quiet = barrier && barrier->finished && barrier->status.is_ok() && has_ended(false);
    quiet_since = is_quiet ? std::min(quiet_since, now()) : never;
    return is_quiet && now() - quiet_since >= last_decisions;
  };
  wait([&] { return has_ended(true) || nothing_can_come(); }, deadline);
}

// Waits for delivery: a connection that is closed with unread bytes in it discards what has not arrived yet.
void Engine::deliver(Nanoseconds deadline) {
  parts_.links.end_writing();
  deadline = std::min(deadline, now() + longest_delivery);
  while (!parts_.links.are_delivered() && now() < deadline) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

// Serves process sets that this rank does not belong to: they may continue without it, but not without the Decisions
// that it makes or forwards.
void Engine::serve_others(Nanoseconds deadline) {
  std::vector<int32_t> others;
  {
    const auto lock = parts_.handles.lock();
    others = parts_.sets.ranks_without(parts_.rank);
  }
  const std::vector<int32_t>& below = parts_.negotiation.subtree();
  std::erase_if(others, [&](int32_t rank) { return !std::binary_search(below.begin(), below.end(), rank); });
  if (others.empty()) return;
  parts_.negotiation.leave(now());
  const auto all_have_finished = [&] {
    return std::all_of(others.begin(), others.end(), [&](int32_t r) { return parts_.negotiation.has_finished(r); });
  };
  while (!is_dead() && finished_above_ < 0 && !all_have_finished() && now() < deadline) {
    const bool moved = pass(now());
    if (parts_.local_peers) parts_.local_peers->ring_all();  // they may sleep until a doorbell rings
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

AbortNotice Engine::failure(const Status& status) const {
  if (status.culprit() >= 0) return {status, status.culprit()};
  return {
      {status.code(), format("%s failed: %s", parts_.names[static_cast<size_t>(parts_.rank)].c_str(), status.text())},
      parts_.rank};
}

void Engine::fail(const AbortNotice& notice, AbortScope scope, Nanoseconds now) {
  if (is_dead()) return;
  AbortNotice first = notice;
  const bool reaches_host = scope != AbortScope::nobody && parts_.local_peers;
  if (reaches_host) {
    // Another rank may have been quicker: then its text counts.
    parts_.local_peers->write_abort({true, notice.status.code(), notice.origin, notice.status.text(), notice.decision});
    const Abort abort = parts_.local_peers->read_abort();
    if (abort.is_there) first = {{abort.status, printable(abort.text, abort.text.size())}, abort.rank, abort.decision};
  }
  if (first.origin < 0 || static_cast<size_t>(first.origin) >= parts_.names.size()) first.origin = parts_.rank;
  {
    const auto lock = parts_.handles.lock();
    death_ = first;
  }
  dead_.store(true, std::memory_order_release);
  parts_.execution.executor().cancel();
  if (scope == AbortScope::everyone) parts_.negotiation.send_abort(first, now);
  if (reaches_host) parts_.local_peers->wake_everyone();
  if (parts_.failure_report.is_wanted() && first.status.code() != SRT_SHUT_DOWN)
    parts_.failure_report.write(first, parts_.program_stack.sample(), parts_.handles);
  end_all_when_quiet();
}

void Engine::end_all_when_quiet() {
  if (!parts_.execution.executor().is_quiet()) return;
  const auto lock = parts_.handles.lock();
  for (Ticket handle : parts_.handles.unfinished()) parts_.handles.end(handle, death_.status);
  submissions_.clear();
  all_ended_ = true;
}

void Engine::end_unplanned(const Status& status) {
  const auto lock = parts_.handles.lock();
  for (Ticket handle : parts_.handles.unfinished())
    if (!parts_.handles.open_entry(handle)->planned) end_refused(handle, status);
}

// Ends a refused operation; the caller holds the handle table's lock. After a refused join this rank may submit again.
void Engine::end_refused(Ticket ticket, const Status& status) {
  const HandleEntry* entry = parts_.handles.open_entry(ticket);
  if (entry && entry->signature->kind == Kind::join)
    if (ProcessSetEntry* set = parts_.sets.find(entry->signature->process_set)) set->is_joined = false;
  parts_.handles.end(ticket, status);
}

}  // namespace sirtaki
