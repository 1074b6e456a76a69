#include "context/state/caller_state.h"

namespace sirtaki {

void CallerState::end_refused(Ticket ticket, const Status& status) {
  const HandleEntry* entry = handles.open_entry(ticket);
  if (entry && entry->signature->kind == Kind::join)
    if (ProcessSetEntry* set = sets.find(entry->signature->process_set)) set->is_joined = false;
  handles.end(ticket, status);
}

void CallerState::end_unplanned(const Status& status) {
  for (Ticket ticket : handles.unfinished())
    if (handles.open_entry(ticket)->state != HandleState::planned) end_refused(ticket, status);
}

std::string CallerState::oldest_unplanned() {
  const HandleEntry* oldest = nullptr;
  for (Ticket ticket : handles.unfinished()) {
    const HandleEntry* entry = handles.open_entry(ticket);
    if (entry->state != HandleState::planned && (!oldest || entry->record < oldest->record)) oldest = entry;
  }
  return oldest ? oldest->signature->name : std::string();
}

}  // namespace sirtaki
