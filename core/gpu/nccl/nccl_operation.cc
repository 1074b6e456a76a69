#include "gpu/nccl/nccl_operation.h"

#include <algorithm>

namespace sirtaki {

NcclOperation::~NcclOperation() {
  const bool is_unmarked = step_ != Step::prepare && !launched_;
  if (!is_unmarked && is_quiet()) return;
  scratch_.abandon();
  for (MemoryBlock& block : neutral_) block.abandon();
}

// Advances step by step. The communicator may continue a call in the background, and accepts the next one when it is
// over.
Status NcclOperation::advance(Nanoseconds, Progress& progress) {
  progress = Progress::blocked;
  for (;;) {
    bool is_free = true;
    if (communicator_) SIRTAKI_TRY(communicator_->poll(is_free));
    if (step_ == Step::launched) break;
    if (!is_free) return Status::ok();
    progress = Progress::moved;
    SIRTAKI_TRY(take_step());
  }
  if (!inputs_.are_ready()) {
    bool have_come = false;
    SIRTAKI_TRY(inputs_.look(have_come));
    if (have_come) progress = Progress::moved;
    return Status::ok();
  }
  bool is_over = false;
  SIRTAKI_TRY(launched_->look(is_over));
  if (is_over) progress = Progress::done;
  return Status::ok();
}

// NCCL may connect its members only when it launches their first operation of a kind.
DeviceWait NcclOperation::device_wait() const {
  if (!launched_) return communicator_ ? DeviceWait::connection : DeviceWait::none;
  if (!inputs_.are_ready()) return DeviceWait::input;
  return communicator_ ? DeviceWait::peers : DeviceWait::none;
}

Status NcclOperation::take_step() {
  switch (step_) {
    case Step::prepare: step_ = Step::call; return prepare();
    case Step::call: step_ = Step::calling; return call();
    default: step_ = Step::launched; return finish_launch();
  }
}

Status NcclOperation::prepare() {
  const bool calls_nccl = communicator_ != nullptr;
  SIRTAKI_TRY(inputs_.hold_back(gpu_.launches()));
  if (const size_t needed = scratch_needed(*transfer_, calls_nccl)) SIRTAKI_TRY(gpu_.memory().take(needed, scratch_));
  calls_ = make_call_list(*transfer_, calls_nccl, scratch_.data());
  SIRTAKI_TRY(copy_in());
  return reduction_.has_factor && communicator_ ? make_operator() : Status::ok();
}

Status NcclOperation::copy_in() {
  std::vector<GpuCopy>& copies = calls_.before;
  const auto end = std::partition(copies.begin(), copies.end(), [](const GpuCopy& copy) { return copy.from; });
  for (auto copy = end; copy != copies.end(); ++copy) SIRTAKI_TRY(fill_with_neutral(*copy));
  return gpu_.copy_all({copies.begin(), end}, gpu_.launches());
}

Status NcclOperation::fill_with_neutral(const GpuCopy& copy) {
  MemoryBlock& block = neutral_.emplace_back();
  SIRTAKI_TRY(gpu_.pinned().take(static_cast<size_t>(copy.bytes), block));
  const FillKernel fill = kernels_.of(transfer_->dtype)->fill[static_cast<int>(transfer_->reduce_op)];
  fill(block.data(), static_cast<size_t>(copy.bytes) / transfer_->element_bytes());
  return gpu_.copy({copy.to, block.data(), copy.bytes}, gpu_.launches());
}

Status NcclOperation::make_operator() {
  alignas(8) uint8_t factor[8];
  kernels_.of(reduction_.factor_dtype)->from_double(factor, &reduction_.factor, 1);
  const NcclFunctions& nccl = communicator_->nccl();
  SIRTAKI_TRY(communicator_->check(
      nccl.create_scaled_sum(&reduction_.op, factor, reduction_.type, nccl_scalar_on_host, communicator_->get()),
      "ncclRedOpCreatePreMulSum"));
  has_operator_ = true;
  return Status::ok();
}

void NcclOperation::destroy_operator() {
  if (has_operator_) std::ignore = communicator_->nccl().destroy_operator(reduction_.op, communicator_->get());
  has_operator_ = false;
}

// Makes all calls in one group, so that pieces move concurrently and exchanges cannot deadlock.
Status NcclOperation::call() {
  if (calls_.has_no_calls()) return Status::ok();
  const NcclFunctions& nccl = communicator_->nccl();
  SIRTAKI_TRY(communicator_->check(nccl.group_start(), "ncclGroupStart"));
  const Status called = call_each();
  const Status ended = communicator_->check(nccl.group_end(), "ncclGroupEnd");  // also after a failed call
  return called.is_ok() ? ended : called;
}

Status NcclOperation::call_each() {
  const NcclFunctions& nccl = communicator_->nccl();
  NcclCommunicator end = communicator_->get();
  for (const NcclCallList::NcclCall& one : calls_.calls) SIRTAKI_TRY(call_rooted(one));
  for (const NcclCallList::NcclCall& one : calls_.collectives) SIRTAKI_TRY(call_collective(one));
  for (const auto& [input, output, bytes, member] : calls_.sends)
    SIRTAKI_TRY(communicator_->check(
        nccl.send(input, static_cast<size_t>(bytes), nccl_uint8, static_cast<int>(member), end, gpu_.launches()),
        "ncclSend"));
  for (const auto& [input, output, bytes, member] : calls_.receives)
    SIRTAKI_TRY(communicator_->check(
        nccl.receive(output, static_cast<size_t>(bytes), nccl_uint8, static_cast<int>(member), end, gpu_.launches()),
        "ncclRecv"));
  return Status::ok();
}

// Makes an all-reduce, a broadcast from one member, or a reduction to one.
Status NcclOperation::call_rooted(const NcclCallList::NcclCall& call) {
  const NcclFunctions& nccl = communicator_->nccl();
  NcclCommunicator end = communicator_->get();
  const auto [type, element_bytes, op] = std::tuple(reduction_.type, reduction_.element_bytes, reduction_.op);
  const auto& [input, output, bytes, member] = call;
  const auto count = static_cast<size_t>(bytes / element_bytes);
  const auto peer = static_cast<int>(member);
  if (!reduces(transfer_->kind))
    return communicator_->check(nccl.broadcast(input, output, count, type, peer, end, gpu_.launches()),
                                "ncclBroadcast");
  if (traits(transfer_->kind).output == Output::whole)
    return communicator_->check(nccl.allreduce(input, output, count, type, op, end, gpu_.launches()), "ncclAllReduce");
  return communicator_->check(nccl.reduce(input, output, count, type, op, peer, end, gpu_.launches()), "ncclReduce");
}

Status NcclOperation::call_collective(const NcclCallList::NcclCall& call) {
  const NcclFunctions& nccl = communicator_->nccl();
  NcclCommunicator end = communicator_->get();
  const auto [type, op, input, output] = std::tuple(reduction_.type, reduction_.op, call.input, call.output);
  const auto count = static_cast<size_t>(call.bytes / reduction_.element_bytes);
  if (reduces(transfer_->kind))
    return communicator_->check(nccl.reducescatter(input, output, count, type, op, end, gpu_.launches()),
                                "ncclReduceScatter");
  return communicator_->check(nccl.allgather(input, output, count, type, end, gpu_.launches()), "ncclAllGather");
}

Status NcclOperation::finish_launch() {
  destroy_operator();
  SIRTAKI_TRY(scale_sums());
  SIRTAKI_TRY(gpu_.copy_all(calls_.after, gpu_.launches()));
  return gpu_.events().record(gpu_.launches(), launched_);
}

// Scales the sums where NCCL has written them.
Status NcclOperation::scale_sums() {
  if (reduction_.after.is_one()) return Status::ok();
  const bool is_at_all = traits(transfer_->kind).output == Output::whole;
  std::vector<GpuCopy> sums;
  for (const auto& [input, output, bytes, member] : calls_.calls)
    if (is_at_all || member == transfer_->own) sums.push_back({output, output, bytes});
  for (const auto& [input, output, bytes, member] : calls_.collectives) sums.push_back({output, output, bytes});
  return gpu_.kernels().scale(reduction_.factor_dtype, sums, reduction_.after, gpu_.launches());
}

// Expects the communicator to be aborted. Work that is already on the stream is still waited for.
void NcclOperation::cancel() {
  has_operator_ = false;  // it is freed with the communicator
  if (step_ != Step::prepare && !launched_) std::ignore = gpu_.events().record(gpu_.launches(), launched_);
}

// Returns whether the GPU has finished. A GPU that has failed counts as finished.
bool NcclOperation::is_quiet() const {
  bool is_over = true;
  return !launched_ || !launched_->look(is_over).is_ok() || is_over;
}

}  // namespace sirtaki
