#include "context/plans/execution.h"

#include <algorithm>
#include <iterator>

#include "context/plans/plan_statistics.h"

namespace sirtaki {
namespace {

void describe_rows(const Signature& signature, int64_t rows, uintptr_t data, srt_tensor& out) {
  describe(signature, data, out);
  out.shape[0] = rows;
  out.bytes = static_cast<uint64_t>(rows * signature.row_bytes());
}

// Returns whether the result can be written to the caller's memory: it has that size, and overwrites no input.
bool is_offer_usable(const HandleEntry& entry, std::optional<int64_t> own_place) {
  if (!entry.offered || entry.output_bytes != static_cast<int64_t>(entry.described.bytes)) return false;
  const uintptr_t input_end = entry.input + static_cast<uintptr_t>(entry.signature->bytes());
  const bool is_apart = input_end <= entry.offered || entry.offered + entry.described.bytes <= entry.input;
  return is_apart || (own_place && entry.input == entry.offered + static_cast<uintptr_t>(*own_place));
}

size_t index_of(const std::vector<int32_t>& members, int32_t rank) {
  return static_cast<size_t>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

std::vector<int32_t> contributors_of(const Plan& plan) {
  std::vector<int32_t> ranks;
  std::set_difference(plan.members.begin(), plan.members.end(), plan.absentees.begin(), plan.absentees.end(),
                      std::back_inserter(ranks));
  return ranks;
}

}  // namespace

Status Execution::start(const Plan& plan, Nanoseconds now) {
  Record record{plan.process_set, {}, plan.tensors.empty() ? "" : plan.tensors.front().signature->name, plan.kind};
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.ticket) record.tickets.push_back(tensor.ticket);
  if (plan.untouched || !moves_tensors(plan.kind)) {
    note_plan_begun(plan, record.tickets, nullptr, parts_.state, now);
    finish(record, {}, plan.untouched ? SRT_RESULT_UNTOUCHED : 0, now);
    return Status::ok();
  }
  if (plan.tensors.front().signature->deadline) note_contributors(plan, record);
  auto transfer = std::make_shared<Transfer>();
  SIRTAKI_TRY(make_transfer(plan, *transfer));
  record.bytes = note_plan_begun(plan, record.tickets, transfer.get(), parts_.state, now);
  Record& kept = records_.emplace(plan.number, std::move(record)).first->second;
  transfer->times = &kept.times;
  transfer->times->are_measured = parts_.timeline.is_running();
  transfer->wire_bytes = &kept.wire_bytes;
  if (parts_.finite_check.wants_notes(*transfer)) transfer->not_finite = &kept.not_finite;
  kept.transfer = transfer;
  executor_.add(std::move(transfer));
  return Status::ok();
}

void Execution::note_contributors(const Plan& plan, Record& record) const {
  record.contributors = contributors_of(plan);
  record.is_late = std::binary_search(plan.absentees.begin(), plan.absentees.end(), parts_.rank);
  const PlannedTensor& tensor = plan.tensors.front();
  if (tensor.is_kept) record.kept = tensor.signature->name;
}

Status Execution::make_transfer(const Plan& plan, Transfer& transfer) {
  const Signature& first = *plan.tensors.front().signature;
  transfer.plan = plan.number;
  transfer.kind = traits(plan.kind).is_of_a_pair ? Kind::alltoall : plan.kind;  // between two members
  transfer.dtype = first.dtype;
  transfer.reduce_op = first.reduce_op;
  transfer.wire_format = first.wire_format;
  transfer.chunk_bytes = plan.chunk_bytes;
  transfer.prescale.factor = first.prescale;
  transfer.postscale.factor = first.postscale;
  if (first.reduce_op == ReduceOp::average)
    transfer.postscale.divisor =
        averages_contributors_ || first.deadline ? plan.contributors : static_cast<int64_t>(plan.members.size());
  transfer.device = first.device;
  transfer.members = plan.members;
  transfer.own = index_of(plan.members, parts_.rank);
  transfer.root = index_of(plan.members, first.root);
  for (const PlannedTensor& tensor : plan.tensors) {
    Status status;
    TensorShare share{tensor, take_entry(tensor, status)};
    if (!plan.absentees.empty() && status.is_ok()) status = leave_out(plan, share);
    if (!status.is_ok()) return status;
    if (share.entry) add_input(*share.entry, transfer);
    const KindTraits& kind = traits(plan.kind);
    if (kind.is_of_a_pair) add_sent(share, transfer);
    else if (kind.output == Output::rows) add_scattered(share, transfer);
    else if (kind.output == Output::whole) add_whole(share, transfer);
    else if (kind.has_splits) SIRTAKI_TRY(add_exchanged(share, transfer));
    else SIRTAKI_TRY(add_gathered(share, transfer));
    SIRTAKI_TRY(parts_.finite_check.look(transfer, *share.tensor.signature, share.input()));
  }
  return Status::ok();
}

// Lets this rank take part with neutral elements if it is late, and keeps the result for a request that has yet to
// come.
Status Execution::leave_out(const Plan& plan, TensorShare& share) {
  share.is_late = std::binary_search(plan.absentees.begin(), plan.absentees.end(), parts_.rank);
  if (!share.tensor.is_kept) return Status::ok();
  return late_results_.keep(share.tensor.signature, contributors_of(plan), share.kept);
}

void Execution::add_input(const HandleEntry& entry, Transfer& transfer) {
  transfer.device = entry.signature->device;  // numbered by each rank
  if (entry.ready && std::find(transfer.inputs.begin(), transfer.inputs.end(), entry.ready) == transfer.inputs.end())
    transfer.inputs.push_back(entry.ready);
}

HandleEntry* Execution::take_entry(const PlannedTensor& tensor, Status& status) {
  if (!tensor.ticket) return nullptr;
  const Access state(parts_.state);
  HandleEntry* entry = state->handles.open_entry(tensor.ticket);
  if (entry) entry->state = HandleState::planned;
  else status = {SRT_INTERNAL, format("'%s' was agreed on, but is not in flight", tensor.signature->name.c_str())};
  return entry;
}

// Adds a whole tensor, which is the same in plan and request. A joined rank has no memory for it.
void Execution::add_whole(const TensorShare& share, Transfer& transfer) {
  const int64_t bytes = share.tensor.signature->bytes();
  transfer.buffer.add(share.input(), share.output(), bytes);
  transfer.tensor_bytes.push_back(bytes);
  if (share.entry) describe(*share.entry->signature, share.entry->output, share.entry->described);
}

void Execution::add_scattered(const TensorShare& share, Transfer& transfer) {
  const Signature& signature = *share.tensor.signature;
  const size_t members = transfer.members.size();
  transfer.outgoing.resize(members);
  const uint8_t* input = share.input();
  for (size_t member = 0; member < members; ++member) {
    const int64_t rows = rows_of_member(signature.shape.front(), members, member);
    const int64_t bytes = rows * signature.row_bytes();
    const bool is_own = member == transfer.own;
    transfer.outgoing[member].add(input, is_own ? share.output() : nullptr, bytes);
    if (input) input += bytes;
    if (is_own && share.entry) describe_rows(signature, rows, share.entry->output, share.entry->described);
  }
}

// Chooses the memory of the output, now that its number of rows is known. `own_place` is the position in it, in bytes,
// at which this rank's input is expected, if all of it belongs there.
Status Execution::make_output(const TensorShare& share, int64_t rows, std::optional<int64_t> own_place) {
  if (!share.entry) return Status::ok();
  HandleEntry& entry = *share.entry;
  describe_rows(*share.tensor.signature, rows, 0, entry.described);
  if (is_offer_usable(entry, own_place)) {
    entry.output = entry.described.data = entry.offered;
    entry.result = SRT_RESULT_OFFERED;  // which a caller on a GPU asks for once the operation is launched
    return Status::ok();
  }
  const Status status = allocate_memory(entry);
  entry.output = entry.described.data;
  if (entry.output) return Status::ok();
  return {SRT_OUT_OF_MEMORY, format("there is no memory for the %llu bytes that '%s' returns%s%s",
                                    static_cast<unsigned long long>(entry.described.bytes),
                                    share.tensor.signature->name.c_str(), status.is_ok() ? "" : ": ", status.text())};
}

Status Execution::allocate_memory(HandleEntry& entry) const {
  const size_t bytes = std::max<size_t>(entry.described.bytes, 1);
  if (entry.allocate) {
    entry.described.data = entry.allocate(entry.user, &entry.described);
  } else if (Gpu* gpu = parts_.gpu.gpu(); gpu && entry.signature->device >= 0) {
    SIRTAKI_TRY(GpuOutput::allocate(*gpu, bytes, entry.gpu_output));
    entry.described.data = reinterpret_cast<uintptr_t>(entry.gpu_output->data());
  } else {
    entry.memory.reset(::operator new(bytes, std::align_val_t{64}, std::nothrow));
    entry.described.data = reinterpret_cast<uintptr_t>(entry.memory.get());
  }
  return Status::ok();
}

Status Execution::add_gathered(const TensorShare& share, Transfer& transfer) {
  const std::vector<int64_t>& rows = share.tensor.rows;
  int64_t total = 0, before = 0;
  for (size_t member = 0; member < transfer.members.size(); ++member) {
    if (member == transfer.own) before = total;
    total += rows[member];
  }
  SIRTAKI_TRY(make_output(share, total, before * share.tensor.signature->row_bytes()));
  transfer.incoming.resize(transfer.members.size());
  uint8_t* output = share.output();
  for (size_t member = 0; member < transfer.members.size(); ++member) {
    const int64_t bytes = rows[member] * share.tensor.signature->row_bytes();
    const uint8_t* input = member == transfer.own ? share.input() : nullptr;
    transfer.incoming[member].add(input, output, bytes);
    if (member == transfer.own) transfer.buffer.add(input, nullptr, bytes);
    if (output) output += bytes;
  }
  return Status::ok();
}

void Execution::add_sent(const TensorShare& share, Transfer& transfer) {
  const Signature& signature = *share.tensor.signature;
  const size_t from = index_of(transfer.members, signature.root);
  const size_t to = index_of(transfer.members, signature.destination);
  transfer.outgoing.resize(2);
  transfer.incoming.resize(2);
  transfer.flows.resize(4);
  transfer.flows[2 * from + to] += signature.bytes();
  if (from == transfer.own) transfer.outgoing[to].add(share.input(), nullptr, signature.bytes());
  else transfer.incoming[from].add(nullptr, share.output(), signature.bytes());
  if (share.entry) describe(signature, share.entry->output, share.entry->described);
}

Status Execution::add_exchanged(const TensorShare& share, Transfer& transfer) {
  const size_t members = transfer.members.size(), own = transfer.own;
  const int64_t row_bytes = share.tensor.signature->row_bytes();
  const auto rows = [&](size_t from, size_t to) { return share.tensor.rows[from * members + to]; };
  std::vector<int64_t> received;
  int64_t total = 0;
  for (size_t from = 0; from < members; ++from) total += received.emplace_back(rows(from, own));
  SIRTAKI_TRY(make_output(share, total, std::nullopt));
  transfer.outgoing.resize(members);
  transfer.incoming.resize(members);
  transfer.flows.resize(members * members);
  for (size_t flow = 0; flow < transfer.flows.size(); ++flow)
    transfer.flows[flow] += share.tensor.rows[flow] * row_bytes;
  const uint8_t* input = share.input();
  uint8_t* output = share.output();
  for (size_t member = 0; member < members; ++member) {
    const int64_t sent = rows(own, member) * row_bytes, got = received[member] * row_bytes;
    transfer.incoming[member].add(member == own ? input : nullptr, output, got);
    if (member != own) transfer.outgoing[member].add(input, nullptr, sent);
    if (input) input += sent;
    if (output) output += got;
  }
  if (share.entry) share.entry->received = std::move(received);
  return Status::ok();
}

Status Execution::advance(Nanoseconds now, bool& moved) {
  if (executor_.is_idle()) return Status::ok();
  changes_.clear();
  const Status status = executor_.advance(now, changes_);
  moved |= changes_.moved;
  if (!changes_.launched.empty()) note_launches();
  const Nanoseconds moment = changes_.finished.empty() ? now : sirtaki::now();
  for (const auto& [number, backend, algorithm] : changes_.finished) {
    const auto record = records_.extract(number);
    finish(record.mapped(), {backend, algorithm}, 0, moment);
  }
  if (status.code() == SRT_DEVICE)
    return {SRT_DEVICE, format("'%s': %s", tensor_of(changes_.failed).c_str(), status.text())};
  return status;
}

// Records launch events and wakes waiters: a caller that waits on a stream waits for nothing more.
void Execution::note_launches() {
  const Access state(parts_.state);
  for (const auto& [plan, event] : changes_.launched)
    for (Ticket ticket : records_.at(plan).tickets) state->handles.set_launched(ticket, event);
  state->handles.wake_waiters();
}

void Execution::finish(const Record& record, const Way& way, uint32_t result, Nanoseconds moment) {
  if (record.not_finite.is_there)
    parts_.finite_check.report(record.not_finite, tensor_at(record, record.not_finite.position), *record.transfer);
  if (record.transfer) parts_.finite_check.look_at_sum(*record.transfer);
  {
    const Access state(parts_.state);
    Observer& observer = state->observer;
    observer.set_moment(moment);
    for (Ticket ticket : record.tickets) {
      if (HandleEntry* entry = state->handles.open_entry(ticket)) {
        entry->result |= record.is_late ? uint32_t{SRT_RESULT_LATE} : result;
        entry->contributors = record.contributors;
        entry->backend = way.backend;
        observer.transferred(entry->record, record.times);
      }
      state->handles.end(ticket, Status::ok());
    }
    OperationCounts::Count& count = state->handles.counts().of(record.kind, way.backend);
    count.bytes += record.bytes;
    count.algorithm = way.algorithm;
    observer.plan_ended(record.wire_bytes);
  }
  if (!record.kept.empty()) late_results_.finished(record.kept);
  parts_.negotiator.plan_finished(record.process_set);
}

// Returns the name of the tensor at a position in what this rank receives, in bytes.
std::string Execution::tensor_at(const Record& record, int64_t position) const {
  const Access state(parts_.state);
  for (Ticket ticket : record.tickets) {
    const HandleEntry* entry = state->handles.open_entry(ticket);
    if (entry) position -= static_cast<int64_t>(entry->described.bytes);
    if (entry && position < 0) return entry->signature->name;
  }
  return record.first_name;
}

std::string Execution::tensor_of(uint64_t plan) const {
  const auto found = records_.find(plan);
  return found == records_.end() ? "" : found->second.first_name;
}

}  // namespace sirtaki
