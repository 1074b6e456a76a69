#include "context/execution.h"

#include "context/plan_statistics.h"

namespace sirtaki {

Status Execution::start(const Plan& plan, Nanoseconds now) {
  Record record{plan.process_set, {}, plan.tensors.empty() ? "" : plan.tensors.front().signature->name};
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.ticket) record.tickets.push_back(tensor.ticket);
  if (plan.untouched || !moves_tensors(plan.kind)) {
    note_plan_begun(plan, record.tickets, nullptr, state_, now);
    finish(record, plan.untouched ? SRT_RESULT_UNTOUCHED : 0, now);
    return Status::ok();
  }
  auto transfer = std::make_shared<Transfer>();
  SIRTAKI_TRY(maker_.make(plan, *transfer));
  note_plan_begun(plan, record.tickets, transfer.get(), state_, now);
  transfer->times = &records_.emplace(plan.number, std::move(record)).first->second.times;
  transfer->times->are_measured = timeline_.is_running();
  executor_.add(std::move(transfer));
  return Status::ok();
}

Status Execution::advance(Nanoseconds now, bool& moved) {
  if (executor_.is_idle()) return Status::ok();
  changes_.clear();
  const Status status = executor_.advance(now, changes_);
  moved |= changes_.moved;
  if (!changes_.launched.empty()) note_launches();
  const Nanoseconds moment = changes_.finished.empty() ? now : sirtaki::now();
  for (uint64_t number : changes_.finished) {
    const auto record = records_.extract(number);
    finish(record.mapped(), 0, moment);
  }
  if (status.code() == SRT_DEVICE)
    return {SRT_DEVICE, format("'%s': %s", tensor_of(changes_.failed).c_str(), status.text())};
  return status;
}

// Records launch events and wakes waiters: a caller that waits on a stream need not wait for more.
void Execution::note_launches() {
  const Access state(state_);
  for (const auto& [plan, event] : changes_.launched)
    for (Ticket ticket : records_.at(plan).tickets)
      if (HandleEntry* entry = state->handles.open_entry(ticket)) entry->launched = event;
  state->handles.wake_waiters();
}

void Execution::finish(const Record& record, uint32_t result, Nanoseconds moment) {
  {
    const Access state(state_);
    Observer& observer = state->observer;
    observer.set_moment(moment);
    for (Ticket ticket : record.tickets) {
      if (HandleEntry* entry = state->handles.open_entry(ticket)) {
        entry->result = result;
        observer.transferred(entry->record, record.times);
      }
      state->handles.end(ticket, Status::ok());
    }
    observer.plan_ended();
  }
  negotiator_.plan_finished(record.process_set);
}

std::string Execution::tensor_of(uint64_t plan) const {
  const auto found = records_.find(plan);
  return found == records_.end() ? "" : found->second.first_name;
}

}  // namespace sirtaki
