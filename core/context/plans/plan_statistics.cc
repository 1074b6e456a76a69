#include "context/plans/plan_statistics.h"

#include <algorithm>

namespace sirtaki {

namespace {

// Returns the bytes of all tensors, sent or received, whichever are more.
int64_t payload(const Transfer& transfer) {
  int64_t outgoing = 0, incoming = 0;
  for (const ScatterList& part : transfer.outgoing) outgoing += part.bytes();
  for (const ScatterList& part : transfer.incoming) incoming += part.bytes();
  return std::max({transfer.buffer.bytes(), outgoing, incoming});
}

}  // namespace

double bus_bytes(const Transfer& transfer) {
  const int64_t bytes = payload(transfer);
  const auto members = static_cast<double>(transfer.members.size());
  const double share = (members - 1) / members;
  switch (transfer.kind) {
    case Kind::allreduce: return 2 * share * static_cast<double>(bytes);
    case Kind::send: return static_cast<double>(bytes);
    case Kind::broadcast: return members > 1 ? static_cast<double>(bytes) : 0;
    default: return share * static_cast<double>(bytes);
  }
}

int64_t note_plan_begun(const Plan& plan, const std::vector<Ticket>& handles, const Transfer* transfer,
                        SharedCallerState& shared, Nanoseconds now) {
  const Access state(shared);
  Observer& observer = state->observer;
  observer.set_moment(now);
  for (Ticket handle : handles) {
    HandleEntry* entry = state->handles.open_entry(handle);
    if (!entry) continue;
    entry->state = HandleState::planned;
    observer.decided(entry->record, plan.number, plan.tensors.size());
  }
  const int64_t bytes = transfer ? payload(*transfer) : 0;
  observer.plan_begun(plan.tensors.size(), bytes, transfer ? bus_bytes(*transfer) : 0);
  return bytes;
}

}  // namespace sirtaki
