#include "context/plans/finite_check.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace sirtaki {

FiniteCheck::FiniteCheck(const FiniteCheckParts& parts, const Config& config)
    : parts_(parts), reaction_(static_cast<Reaction>(config.integer(Knob::non_finite))) {}

Status FiniteCheck::look(const Transfer& transfer, const Signature& signature, const uint8_t* input) {
  const FiniteKernel are_finite = is_looking() && input ? kernel_for(transfer) : nullptr;
  if (!are_finite || (reaction_ != Reaction::stop && finds_in_sum(transfer))) return Status::ok();
  const size_t size = transfer.element_bytes(), elements = static_cast<size_t>(signature.bytes()) / size;
  if (are_finite(input, elements)) return Status::ok();
  size_t index = 0;
  while (are_finite(input + index * size, 1)) ++index;
  double value = std::nan("");  // or a complex number with one
  if (const auto to_double = parts_.kernels.of(transfer.dtype)->to_double) to_double(&value, input + index * size, 1);
  const NotFinite found{true, std::isnan(value), true, parts_.own.rank, 0};
  if (reaction_ == Reaction::stop)
    return {SRT_NOT_FINITE,
            describe(found, signature.name, transfer.members.size()) +
                ". The job ends before another rank receives it (non_finite=stop)",
            parts_.own.rank};
  report(found, signature.name, transfer);
  return Status::ok();
}

bool FiniteCheck::wants_notes(const Transfer& transfer) const {
  return is_looking() && reaction_ != Reaction::stop && kernel_for(transfer) && finds_in_sum(transfer);
}

void FiniteCheck::report(const NotFinite& found, const std::string& tensor, const Transfer& transfer) {
  if (std::exchange(is_told_, true) || !is_first(found, transfer)) return;
  parts_.log.line(describe(found, tensor, transfer.members.size()) +
                  ". The sum carries it to all ranks. SIRTAKI_NON_FINITE=stop ends the job at such a value, off is "
                  "silent");
}

// Returns whether this rank has to report a value. The culprit reports what all ranks see; else the rank does whose
// part of the sum has the first such value of the plan.
bool FiniteCheck::is_first(const NotFinite& found, const Transfer& transfer) const {
  if (found.is_seen_by_all || found.rank < 0) return found.rank == parts_.own.rank;
  if (traits(transfer.kind).output != Output::whole) return true;  // this rank does not get the rest
  const FiniteKernel are_finite = kernel_for(transfer);
  bool result = true;
  transfer.buffer.visit(0, found.position, [&](const uint8_t*, const uint8_t* output, int64_t, int64_t bytes) {
    result = result && (!output || are_finite(output, static_cast<size_t>(bytes) / transfer.element_bytes()));
  });
  return result;
}

void FiniteCheck::look_at_sum(const Transfer& transfer) {
  constexpr int64_t sample = 64;  // bytes: within a step, a NaN spreads to whole tensors
  const FiniteKernel are_finite = reaction_ == Reaction::say && is_looking() ? kernel_for(transfer) : nullptr;
  if (!are_finite) return;
  const bool is_cut = traits(transfer.kind).output == Output::rows;
  const ScatterList& list = is_cut ? transfer.outgoing[transfer.own] : transfer.buffer;
  list.visit(0, std::min(list.bytes(), sample), [&](const uint8_t*, const uint8_t* output, int64_t, int64_t bytes) {
    if (output && !are_finite(output, static_cast<size_t>(bytes) / transfer.element_bytes())) is_told_ = true;
  });
}

// Returns whether all members share memory: there each rank sees every value that it adds.
bool FiniteCheck::finds_in_sum(const Transfer& transfer) const {
  const LocalPeers* peers = parts_.own.local_peers;
  return peers && transfer.reduce_op != ReduceOp::adasum &&
         std::ranges::all_of(transfer.members, [&](int32_t member) { return peers->slot_of(member) >= 0; });
}

// Returns nullptr for what is not looked at.
FiniteKernel FiniteCheck::kernel_for(const Transfer& transfer) const {
  const ReduceOp op = transfer.reduce_op;
  const bool adds = op == ReduceOp::sum || op == ReduceOp::average || op == ReduceOp::adasum;
  if (!traits(transfer.kind).reduces || !adds || transfer.device >= 0 || transfer.members.size() < 2) return nullptr;
  const DTypeKernels* kernels = parts_.kernels.of(transfer.dtype);
  return kernels ? kernels->are_finite : nullptr;
}

std::string FiniteCheck::describe(const NotFinite& found, const std::string& tensor, size_t members) const {
  int64_t steps = 0;
  {
    const Access state(parts_.state);
    steps = state->observer.steps().number();
  }
  std::string text = format("%s adds %s to the sum of '%s' over %zu ranks", parts_.own.name_of(found.rank).c_str(),
                            found.is_nan ? "a NaN" : "an infinite value", tensor.c_str(), members);
  if (steps) text += format(", after %lld training steps", static_cast<long long>(steps));  // else none is counted
  const StackSample stack = parts_.program_stack.sample();
  return stack.frames.empty() ? text : text + ", " + name_place(stack.frames);
}

}  // namespace sirtaki
