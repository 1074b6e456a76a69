#include "gpu/gpu_backend.h"

#include <algorithm>
#include <system_error>

#include "base/system/thread.h"
#include "gpu/gpu_operation.h"
#include "gpu/nccl/reduction.h"

namespace sirtaki {

GpuBackend::GpuBackend(GpuParts parts, const Config& config)
    : parts_(std::move(parts)), wish_(config.text(Knob::gpu_backend)), encrypts_(config.integer(Knob::encrypt) != 0) {}

std::unique_ptr<Operation> GpuBackend::start(TransferPtr transfer) {
  std::unique_ptr<GpuGroup>& group = groups_[transfer->members];
  if (!group) group = std::make_unique<GpuGroup>();
  if (is_alone(*transfer) || wish_ == "staged") group->has_agreed = true;
  return std::make_unique<GpuOperation>(*this, *group, std::move(transfer));
}

const GpuGroup* GpuBackend::find(const Transfer& transfer) const {
  const auto found = groups_.find(transfer.members);
  return found == groups_.end() ? nullptr : found->second.get();
}

BackendName GpuBackend::name(const Transfer& transfer) const {
  if (is_alone(transfer)) return BackendName::single_rank;
  const GpuGroup* group = find(transfer);
  return group && goes_through_nccl(*group, transfer) ? BackendName::nccl : BackendName::staged;
}

// Returns the needs of a transfer. Until its members have agreed on a transport and connected, a group needs
// everything exclusively: later transfers, here and at the other members, follow in the order of plans.
unsigned GpuBackend::needs(const Transfer& transfer) const {
  const GpuGroup* group = find(transfer);
  const bool has_agreed = (group && group->has_agreed) || is_alone(transfer) || wish_ == "staged";
  if (!has_agreed) return needs_slots | needs_links | needs_launches;
  if (group && goes_through_nccl(*group, transfer)) return needs_launches;
  const Backend* on_cpu = backend_on_cpu(transfer);
  return on_cpu ? on_cpu->needs(transfer) | needs_launches : needs_launches;
}

bool GpuBackend::goes_through_nccl(const GpuGroup& group, const Transfer& transfer) const {
  if (is_alone(transfer)) return is_identity(transfer);  // copies only, which need no NCCL
  return group.uses_nccl && nccl_reduction(transfer, group.has_kernels).has_value();
}

bool GpuBackend::launches_behind_inputs(const Signature& signature, const std::vector<int32_t>& members) const {
  const GpuGroup unknown;
  Transfer transfer;  // only the fields that decide
  const bool is_of_a_pair = traits(signature.kind).is_of_a_pair;
  transfer.kind = is_of_a_pair ? Kind::alltoall : signature.kind;
  transfer.dtype = signature.dtype;
  transfer.reduce_op = signature.reduce_op;
  transfer.prescale.factor = signature.prescale;
  transfer.postscale.factor = signature.postscale;
  transfer.members = members;
  if (is_of_a_pair) {
    const auto [first, second] = std::minmax(signature.root, signature.destination);
    transfer.members = {first, second};
  }
  if (signature.reduce_op == ReduceOp::average)
    transfer.postscale.divisor = static_cast<int64_t>(transfer.members.size());
  const GpuGroup* group = find(transfer);
  return goes_through_nccl(group ? *group : unknown, transfer);
}

Backend* GpuBackend::backend_on_cpu(const Transfer& transfer) const {
  Transfer there;  // only the fields that backends read
  there.kind = transfer.kind;
  there.dtype = transfer.dtype;
  there.reduce_op = transfer.reduce_op;
  there.members = transfer.members;
  there.own = transfer.own;
  there.buffer.add(nullptr, nullptr, transfer.buffer.bytes());
  const auto found =
      std::find_if(parts_.on_cpu.begin(), parts_.on_cpu.end(), [&](const Backend* b) { return b->serves(there); });
  return found == parts_.on_cpu.end() ? nullptr : *found;
}

Status GpuBackend::decide(const Transfer& transfer, const std::vector<GpuFacts>& facts, GpuGroup& group) {
  RankNames names;
  for (int32_t member : transfer.members) names.push_back(parts_.names[static_cast<size_t>(member)]);
  const std::string obstacle = obstacle_to_nccl(facts, names, encrypts_);
  group.has_agreed = true;
  group.uses_nccl = obstacle.empty();
  const std::string obstacle_to_scaling = obstacle_to_kernels(facts, names);
  group.has_kernels = obstacle_to_scaling.empty();
  group.id = facts.front().id;
  if (!group.uses_nccl && wish_ == "nccl") return {SRT_DEVICE, "the setting gpu_backend is nccl, but " + obstacle};
  if (transfer.own != 0) return Status::ok();
  if (group.uses_nccl) {
    parts_.log.line(format("GPUs of %zu rank%s: %s", facts.size(), facts.size() > 1 ? "s" : "",
                           parts_.choice.gpu()->device().libraries().found_nccl().text.c_str()));
    if (!group.has_kernels)
      parts_.log.line("averages and factors of 16-bit floats are rounded before the sum: " + obstacle_to_scaling);
    if (makes_nccl_block())
      parts_.log.line(
          "NCCL_COMM_BLOCKING=1 is set: NCCL's calls then block without a deadline, also if a rank is lost. Unset it");
  } else if (!has_warned_) {
    has_warned_ = true;
    parts_.log.line("tensors on GPUs go through the memory of the host, which is slow: " + obstacle);
  }
  return Status::ok();
}

// Aborts all communicators together: in one NCCL group, or, where NCCL aborts one by one, in a thread for each. An
// abort frees memory, which waits for all kernels on the GPU: for those of a communicator whose own abort would come
// later, and for those that still compute an input. The latter may take long, so that no abort is in this thread.
void GpuBackend::abort() {
  std::vector<Communicator*> open;
  for (const auto& [members, group] : groups_) {
    if (!group->is_open()) continue;
    group->is_aborted = true;
    open.push_back(group->communicator.get());
  }
  if (open.empty()) return;
  const GpuDevice& device = parts_.choice.gpu()->device();
  if (device.libraries().found_nccl().version < groups_aborts_from) {
    for (Communicator* communicator : open) start_abort([communicator] { communicator->abort(); });
    return;
  }
  start_abort([open, &device] {
    const GpuDevice::Scope scope(&device);
    const NcclFunctions& nccl = device.libraries().nccl();
    const bool is_grouped = nccl.group_start() == nccl_success;
    for (Communicator* communicator : open) communicator->abort();
    if (is_grouped) std::ignore = nccl.group_end();
  });
}

void GpuBackend::start_abort(std::function<void()> abort) {
  try {
    aborts_.push_back(start_thread(abort));
  } catch (const std::system_error&) {  // the limit of threads is reached
    abort();
  }
}

void GpuBackend::await_abort() {
  for (std::thread& thread : aborts_) thread.join();
  aborts_.clear();
}

void GpuBackend::finish(Nanoseconds deadline) {
  await_abort();  // the end of the world has cancelled operations that were in flight
  for (const auto& [members, group] : groups_)
    if (group->communicator && !group->is_aborted) group->communicator->finish(deadline);
}

}  // namespace sirtaki
