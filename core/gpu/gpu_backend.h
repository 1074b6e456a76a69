// Transfers of tensors on GPUs: through NCCL where all members can use it, else staged through the CPU's data plane.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "data/kernels/kernels.h"
#include "gpu/backend_handshake.h"
#include "gpu/communicator.h"

namespace sirtaki {

struct GpuParts {
  const GpuChoice& choice;
  const Kernels& kernels;
  const Log& log;
  const RankNames& names;             // by rank of the world
  const std::vector<int32_t>& host_of;
  int32_t rank;
  std::vector<Backend*> on_cpu;       // the first that serves a transfer runs it there
};

// Ranks whose GPUs work together. Process sets of the same ranks share it, and it lasts as long as the context.
struct GpuGroup {
  bool has_agreed = false;
  bool uses_nccl = false;
  NcclUniqueId id = {};
  std::unique_ptr<Communicator> communicator;  // made when the first plan needs it
};

class GpuBackend final : public Backend {
 public:
  GpuBackend(GpuParts parts, const Config& config);

  bool serves(const Transfer& transfer) const override { return transfer.device >= 0; }
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer& transfer) const override;

  // Ends the communicators in good order, by the deadline.
  void finish(Nanoseconds deadline);

  // Used by its operations.
  const GpuParts& parts() const { return parts_; }
  bool goes_through_nccl(const GpuGroup& group, const Transfer& transfer) const;
  Backend* backend_on_cpu(const Transfer& transfer) const;
  // Decides how the members of a transfer work together, by the facts that they have exchanged.
  Status decide(const Transfer& transfer, const std::vector<GpuFacts>& facts, GpuGroup& group);

 private:
  const GpuGroup* find(const Transfer& transfer) const;
  bool is_alone(const Transfer& transfer) const { return transfer.members.size() == 1; }

  GpuParts parts_;
  const std::string wish_;  // the knob gpu_backend
  const bool encrypts_;     // the knob encrypt
  bool has_warned_ = false;
  std::map<std::vector<int32_t>, std::unique_ptr<GpuGroup>> groups_;  // by members
};

}  // namespace sirtaki
