#include "context/execution.h"

#include <algorithm>

#include "context/accounting.h"

namespace sirtaki {
namespace {

void describe(const Signature& signature, uintptr_t data, srt_tensor& out) {
  out.data = data;
  out.dtype = static_cast<int32_t>(signature.dtype);
  out.dimensions = static_cast<int32_t>(signature.shape.size());
  std::copy(signature.shape.begin(), signature.shape.end(), out.shape);
  out.bytes = static_cast<uint64_t>(signature.bytes());
}

size_t index_of(const std::vector<int32_t>& members, int32_t rank) {
  return static_cast<size_t>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

}  // namespace

Status Execution::start(const Plan& plan, Nanoseconds now) {
  Record record{plan.process_set, {}, plan.tensors.empty() ? "" : plan.tensors.front().signature->name};
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.ticket) record.tickets.push_back(tensor.ticket);
  if (plan.untouched || plan.kind == Kind::barrier) {
    note_plan_begun(plan, record.tickets, nullptr, handles_, now);
    finish(record, plan.untouched ? SRT_RESULT_UNTOUCHED : 0, now);
    return Status::ok();
  }
  auto transfer = std::make_shared<Transfer>();
  SIRTAKI_TRY(fill(plan, *transfer));
  note_plan_begun(plan, record.tickets, transfer.get(), handles_, now);
  transfer->times = &records_.emplace(plan.number, std::move(record)).first->second.times;
  executor_.add(std::move(transfer));
  return Status::ok();
}

Status Execution::fill(const Plan& plan, Transfer& transfer) {
  const Signature& first = *plan.tensors.front().signature;
  transfer.plan = plan.number;
  transfer.kind = plan.kind;
  transfer.dtype = first.dtype;
  transfer.reduce_op = first.reduce_op;
  transfer.prescale.factor = first.prescale;
  transfer.postscale.factor = first.postscale;
  if (first.reduce_op == ReduceOp::average) transfer.postscale.divisor = static_cast<int64_t>(plan.members.size());
  transfer.device = first.device;
  transfer.members = plan.members;
  transfer.own = index_of(plan.members, rank_);
  transfer.root = index_of(plan.members, first.root);
  for (const PlannedTensor& tensor : plan.tensors) {
    Entry* entry = nullptr;
    if (tensor.ticket) {
      const auto lock = handles_.lock();
      entry = handles_.open_entry(tensor.ticket);
      if (!entry)
        return {SRT_INTERNAL, format("'%s' was agreed on, but is not in flight", tensor.signature->name.c_str())};
      transfer.device = entry->signature->device;  // ranks number their devices as they like
    }
    if (plan.kind == Kind::allgather) {
      SIRTAKI_TRY(fill_gather(tensor, entry, transfer));
      continue;
    }
    // What the plan says and what this rank asked for are equal, but for a tensor that a joined rank does not have.
    transfer.buffer.add(entry ? reinterpret_cast<const uint8_t*>(entry->input) : nullptr,
                        entry ? reinterpret_cast<uint8_t*>(entry->output) : nullptr, tensor.signature->bytes());
    if (entry) describe(*entry->signature, entry->output, entry->described);
  }
  return Status::ok();
}

Status Execution::fill_gather(const PlannedTensor& tensor, Entry* entry, Transfer& transfer) {
  Signature whole = *tensor.signature;
  whole.shape.front() = 1;
  const int64_t row_bytes = whole.bytes();
  whole.shape.front() = 0;
  for (int64_t rows : tensor.first_dimensions) whole.shape.front() += rows;
  uint8_t* output = nullptr;
  if (entry) {
    describe(whole, 0, entry->described);
    if (entry->allocate) {
      entry->described.data = entry->allocate(entry->user, &entry->described);
    } else {
      entry->memory.reset(
          ::operator new(std::max<size_t>(entry->described.bytes, 1), std::align_val_t{64}, std::nothrow));
      entry->described.data = reinterpret_cast<uintptr_t>(entry->memory.get());
    }
    output = reinterpret_cast<uint8_t*>(entry->described.data);
    if (!output)
      return {SRT_OUT_OF_MEMORY, format("there is no memory for the %lld bytes that all-gather '%s' returns",
                                        static_cast<long long>(whole.bytes()), whole.name.c_str())};
  }
  transfer.gathered.resize(transfer.members.size());
  for (size_t member = 0; member < transfer.members.size(); ++member) {
    const int64_t bytes = tensor.first_dimensions[member] * row_bytes;
    const bool is_own = member == transfer.own && entry;
    const auto* input = is_own ? reinterpret_cast<const uint8_t*>(entry->input) : nullptr;
    transfer.gathered[member].add(input, output, bytes);
    if (is_own) transfer.buffer.add(input, nullptr, bytes);
    if (output) output += bytes;
  }
  return Status::ok();
}

Status Execution::advance(Nanoseconds now, bool& moved) {
  if (executor_.is_idle()) return Status::ok();
  finished_.clear();
  const Status status = executor_.advance(now, finished_, moved);
  const Nanoseconds moment = finished_.empty() ? now : sirtaki::now();
  for (uint64_t number : finished_) {
    const auto record = records_.extract(number);
    finish(record.mapped(), 0, moment);
  }
  return status;
}

void Execution::finish(const Record& record, uint32_t result, Nanoseconds moment) {
  {
    const auto lock = handles_.lock();
    Observer& observer = handles_.observer();
    observer.set_moment(moment);
    for (Ticket ticket : record.tickets) {
      if (Entry* entry = handles_.open_entry(ticket)) {
        entry->result = result;
        observer.transferred(entry->record, record.times);
      }
      handles_.end(ticket, Status::ok());
    }
    observer.plan_ended();
  }
  member_.plan_finished(record.process_set);
}

std::string Execution::tensor_of(uint64_t plan) const {
  const auto found = records_.find(plan);
  return found == records_.end() ? "" : found->second.first_name;
}

}  // namespace sirtaki
