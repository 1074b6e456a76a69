#include "gpu/staged_operation.h"

namespace sirtaki {
namespace {

constexpr int64_t host_alignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + host_alignment - 1) / host_alignment * host_alignment; }

// Returns the maximum of memory on the host that a list needs.
int64_t bytes_on_host(const ScatterList& list) {
  int64_t total = 0;
  list.visit(0, list.bytes(), [&](const uint8_t* input, const uint8_t* output, int64_t, int64_t bytes) {
    total += aligned(bytes) * ((input ? 1 : 0) + (output && output != input ? 1 : 0));
  });
  return total;
}

}  // namespace

StagedOperation::StagedOperation(Gpu* gpu, Backend& backend, const Transfer& on_gpu, int32_t phase)
    : gpu_(gpu), backend_(backend), transfer_(std::make_shared<Transfer>(on_gpu)), inputs_(on_gpu.inputs) {
  transfer_->device = -1;
  transfer_->phase = phase;
}

StagedOperation::~StagedOperation() {
  if (is_unmarked_ || !is_quiet()) memory_.abandon();
}

Status StagedOperation::advance(Nanoseconds now, Progress& progress) {
  progress = Progress::moved;
  if (step_ == Step::start) {
    step_ = Step::copying_in;
    SIRTAKI_TRY(mirror());
    SIRTAKI_TRY(inputs_.hold_back(gpu_ ? gpu_->copies() : nullptr));
    return copy(in_);
  }
  if (!inputs_.are_ready()) {
    bool have_come = false;
    SIRTAKI_TRY(inputs_.look(have_come));
    if (!have_come) progress = Progress::blocked;
    return Status::ok();
  }
  if (step_ == Step::copying_in || step_ == Step::copying_out) {
    bool is_over = false;
    SIRTAKI_TRY(look(is_over));
    if (!is_over) progress = Progress::blocked;
    else if (step_ == Step::copying_out) progress = Progress::done;
    if (progress != Progress::moved) return Status::ok();
    step_ = Step::moving;
    inner_ = backend_.start(transfer_);
  }
  Progress inner = Progress::done;
  if (inner_) SIRTAKI_TRY(inner_->advance(now, inner));
  progress = inner == Progress::blocked ? Progress::blocked : Progress::moved;
  if (inner != Progress::done) return Status::ok();
  inner_.reset();
  step_ = Step::copying_out;
  return copy(out_);
}

// Replaces the lists by copies of them that refer to host memory.
Status StagedOperation::mirror() {
  int64_t needed = bytes_on_host(transfer_->buffer);
  for (const auto* lists : {&transfer_->outgoing, &transfer_->incoming})
    for (const ScatterList& list : *lists) needed += bytes_on_host(list);
  if (!needed) return Status::ok();
  SIRTAKI_TRY(gpu_->pinned().take(static_cast<size_t>(needed), memory_));
  uint8_t* free_memory = memory_.data();
  transfer_->buffer = mirror(transfer_->buffer, free_memory);
  for (auto* lists : {&transfer_->outgoing, &transfer_->incoming})
    for (ScatterList& list : *lists) list = mirror(list, free_memory);
  return Status::ok();
}

ScatterList StagedOperation::mirror(const ScatterList& list, uint8_t*& free_memory) {
  ScatterList mirrored;
  list.visit(0, list.bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
    uint8_t *from = nullptr, *to = nullptr;
    if (input) {
      const auto [known, is_new] = mirrored_.try_emplace({input, bytes}, free_memory);
      from = known->second;
      if (is_new) {
        in_.push_back({from, input, bytes});
        free_memory += aligned(bytes);
      }
    }
    if (output) {
      to = output == input ? from : free_memory;
      if (output != input) free_memory += aligned(bytes);
      out_.push_back({output, to, bytes});
    }
    mirrored.add(from, to, bytes);
  });
  return mirrored;
}

Status StagedOperation::copy(const std::vector<GpuCopy>& copies) {
  if (copies.empty()) return Status::ok();
  is_unmarked_ = true;
  for (const GpuCopy& copy : copies) SIRTAKI_TRY(gpu_->copy(copy, gpu_->copies()));
  return mark();
}

Status StagedOperation::mark() {
  SIRTAKI_TRY(gpu_->events().record(gpu_->copies(), copied_));
  is_unmarked_ = false;
  return Status::ok();
}

Status StagedOperation::look(bool& is_over) const {
  is_over = true;
  return copied_ ? copied_->look(is_over) : Status::ok();
}

void StagedOperation::cancel() {
  if (is_unmarked_) std::ignore = mark();
  if (inner_) inner_->cancel();
}

bool StagedOperation::is_quiet() const {
  if (inner_ && !inner_->is_quiet()) return false;
  bool is_over = true;
  return !look(is_over).is_ok() || is_over;
}

std::vector<int32_t> StagedOperation::waits_for() const {
  return inner_ ? inner_->waits_for() : std::vector<int32_t>{};
}

// Releases the CPU's data plane when the copies back begin, because the other ranks then have all data of this one.
unsigned StagedOperation::still_needs(unsigned needed_at_start) const {
  return step_ == Step::copying_out ? needs_nothing : needed_at_start;
}

}  // namespace sirtaki
