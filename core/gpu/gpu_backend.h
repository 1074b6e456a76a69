// The backend for tensors on GPUs: through NCCL if all members can use it, else staged through the CPU's data plane.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "data/kernels/kernels.h"
#include "gpu/backend_handshake.h"
#include "gpu/nccl/communicator.h"

namespace sirtaki {

struct GpuParts {
  const GpuChoice& choice;
  const Kernels& kernels;
  const Log& log;
  const RankNames& names;             // by rank of the world
  const std::vector<int32_t>& host_of;
  int32_t rank;
  std::vector<Backend*> on_cpu;       // the first that serves a staged transfer runs it
};

// Ranks whose GPUs share a communicator. Process sets of the same ranks share the group, which lasts as long as the
// context. Its communicator has an id of its own: ncclCommSplit, which could share another communicator's memory, needs
// all ranks of that, also those outside of the group, and nothing in flight on it.
struct GpuGroup {
  bool is_open() const { return communicator && !is_aborted && communicator->is_open(); }

  bool has_agreed = false;
  bool is_aborted = false;  // its communicator belongs to the thread that aborts it
  bool uses_nccl = false;
  bool has_kernels = false;  // all members'
  NcclUniqueId id = {};
  std::unique_ptr<Communicator> communicator;  // created when the first plan needs it
};

class GpuBackend final : public Backend {
 public:
  GpuBackend(GpuParts parts, const Config& config);
  ~GpuBackend() override { await_abort(); }

  BackendName name(const Transfer& transfer) const override;
  bool serves(const Transfer& transfer) const override { return transfer.device >= 0; }
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer& transfer) const override;
  // Returns whether such an operation of these members is launched behind its inputs on the GPU, as far as is known.
  // Others need their inputs to be ready when they start.
  bool launches_behind_inputs(const Signature& signature, const std::vector<int32_t>& members) const;

  // Finalizes the communicators that are not being aborted, by the deadline.
  void finish(Nanoseconds deadline);
  // Begins to abort the communicators, because the world has failed. Waits for no other rank, and not for the GPU.
  void abort();
  // Waits for the end of what abort() has begun.
  void await_abort();

  // Functions for its operations.
  const GpuParts& parts() const { return parts_; }
  bool goes_through_nccl(const GpuGroup& group, const Transfer& transfer) const;
  Backend* backend_on_cpu(const Transfer& transfer) const;
  // Chooses the transport of a transfer's members by the properties that they have exchanged.
  Status decide(const Transfer& transfer, const std::vector<GpuFacts>& facts, GpuGroup& group);

 private:
  const GpuGroup* find(const Transfer& transfer) const;
  // Returns whether a transfer needs no other rank, and so neither NCCL nor an agreement. Where NCCL is asked for, a
  // single member has a communicator, too: it shows that NCCL works.
  bool is_alone(const Transfer& transfer) const { return transfer.members.size() == 1 && wish_ != "nccl"; }
  void start_abort(std::function<void()> abort);

  GpuParts parts_;
  const std::string wish_;  // the knob gpu_backend
  const bool encrypts_;     // the knob encrypt
  bool has_warned_ = false;
  std::vector<std::thread> aborts_;
  std::map<std::vector<int32_t>, std::unique_ptr<GpuGroup>> groups_;  // by members
};

}  // namespace sirtaki
