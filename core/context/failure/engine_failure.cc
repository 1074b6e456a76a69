#include "context/failure/engine_failure.h"

#include <new>

#include "base/log.h"
#include "base/text.h"

namespace sirtaki {

std::optional<AbortNotice> failure_of_host(const LocalPeers& peers) {
  const Abort abort = peers.read_abort();
  if (!abort.is_there) return std::nullopt;
  return AbortNotice{{abort.status, printable(abort.text, abort.text.size())}, abort.rank, abort.decision};
}

EngineFailure::EngineFailure(const EngineFailureParts& parts)
    : parts_(parts), no_memory_{{SRT_OUT_OF_MEMORY, "no memory left"}, parts.own.rank} {}

AbortNotice EngineFailure::blame(const Status& status) const {
  if (status.culprit() >= 0) return {status, status.culprit()};
  return {{status.code(), format("%s failed: %s", parts_.own.name().c_str(), status.text())}, parts_.own.rank};
}

// Publishes a failure in the host's shared memory. Returns the host's first failure, which may be another rank's.
AbortNotice EngineFailure::agree_with_host(const AbortNotice& notice) const {
  LocalPeers& peers = *parts_.own.local_peers;
  peers.write_abort({true, notice.status.code(), notice.origin, notice.status.text(), notice.decision});
  return failure_of_host(peers).value_or(notice);
}

void EngineFailure::fail(const AbortNotice& notice, AbortScope scope, Nanoseconds now) {
  if (has_happened()) return;
  const bool reaches_host = scope != AbortScope::nobody && parts_.own.local_peers;
  AbortNotice first = reaches_host ? agree_with_host(notice) : notice;
  if (!parts_.own.exists(first.origin)) first.origin = parts_.own.rank;
  notice_ = first;
  has_happened_.store(true, std::memory_order_release);
  notify(first, scope, now);
  parts_.execution.executor().cancel();
  if (parts_.report.is_wanted() && first.status.code() != SRT_SHUT_DOWN) parts_.report.write(first);
  end_unstarted();
  end_all_when_quiet();
}

// Notifies the other ranks, before this one cancels its own operations: on a GPU that waits for every kernel, also for
// those of other libraries, whose peers may be among the notified ranks. Without memory for a message they learn of
// the failure when this process ends.
void EngineFailure::notify(const AbortNotice& notice, AbortScope scope, Nanoseconds now) {
  try {
    if (scope == AbortScope::everyone) parts_.negotiation.send_abort(notice, now);
  } catch (const std::bad_alloc&) {
  }
  if (scope != AbortScope::nobody && parts_.own.local_peers) parts_.own.local_peers->wake_everyone();
}

void EngineFailure::fail(const Status& status, Nanoseconds now) { fail(blame(status), AbortScope::everyone, now); }

// Fails the context. The interrupted iteration has freed its memory, so there is usually room for a message to all
// ranks.
void EngineFailure::fail_without_memory(Nanoseconds now) {
  try {
    return fail(Status(SRT_OUT_OF_MEMORY, "there is no memory left"), now);
  } catch (const std::bad_alloc&) {
    if (has_happened()) return;
    notice_ = no_memory_;
    has_happened_.store(true, std::memory_order_release);
    parts_.execution.executor().cancel();
  }
}

// Ends the operations that use no memory yet, before those that a GPU may use for as long as it computes their inputs.
void EngineFailure::end_unstarted() const {
  const Access state(parts_.state);
  state->end_unplanned(notice_.status);
}

void EngineFailure::end_all_when_quiet() {
  if (!parts_.execution.executor().is_quiet()) return;
  const Access state(parts_.state);
  for (Ticket handle : state->handles.unfinished()) state->handles.end(handle, notice_.status);
  state->handles.wake_collectors();
  has_ended_all_ = true;
}

}  // namespace sirtaki
