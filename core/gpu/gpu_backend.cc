#include "gpu/gpu_backend.h"

#include <algorithm>
#include <system_error>
#include <thread>

#include "gpu/gpu_operation.h"
#include "gpu/reduction.h"

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
  return group.uses_nccl && nccl_reduction(transfer).has_value();
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
  group.id = facts.front().id;
  if (!group.uses_nccl && wish_ == "nccl") return {SRT_DEVICE, "the setting gpu_backend is nccl, but " + obstacle};
  if (transfer.own != 0) return Status::ok();
  if (group.uses_nccl) {
    parts_.log.line(format("GPUs of %zu rank%s: %s", facts.size(), facts.size() > 1 ? "s" : "",
                           parts_.choice.gpu()->device().libraries().found_nccl().text.c_str()));
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
// abort frees memory, which waits for all kernels on the GPU: also for those of a communicator whose own abort would
// come later.
void GpuBackend::abort() {
  const Gpu* gpu = parts_.choice.gpu();
  if (std::none_of(groups_.begin(), groups_.end(), [](const auto& one) { return one.second->is_open(); })) return;
  const GpuLibraries& libraries = gpu->device().libraries();
  if (libraries.found_nccl().version < groups_aborts_from) return abort_in_threads();
  const GpuDevice::Scope scope(&gpu->device());
  const bool is_grouped = libraries.nccl().group_start() == nccl_success;
  for (const auto& [members, group] : groups_)
    if (group->is_open()) group->communicator->abort();
  if (is_grouped) std::ignore = libraries.nccl().group_end();
}

void GpuBackend::abort_in_threads() const {
  std::vector<std::thread> threads;
  for (const auto& [members, group] : groups_) {
    if (!group->is_open()) continue;
    Communicator& communicator = *group->communicator;
    try {
      threads.emplace_back([&communicator] { communicator.abort(); });
    } catch (const std::system_error&) {  // the limit of threads is reached
      communicator.abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
}

void GpuBackend::finish(Nanoseconds deadline) {
  for (const auto& [members, group] : groups_)
    if (group->communicator) group->communicator->finish(deadline);
}

}  // namespace sirtaki
