// The agreement of some ranks on the transport between their GPUs: each rank sends the others its properties over the
// data plane of the CPU, and all make the same decision.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/links/link_operation.h"
#include "data/operation.h"
#include "gpu/device/gpu.h"

namespace sirtaki {

// The properties that one rank sends, as raw bytes, because all ranks run the same build.
struct GpuFacts {
  int32_t host = 0;              // index of its host
  int32_t nccl_version = 0;      // 0: it cannot use NCCL
  int32_t shares_gpus = 0;       // 1: NCCL_MULTI_RANK_GPU_ENABLE is set
  NcclUniqueId id = {};          // created by the first member
  char host_id[256] = {};        // NCCL_HOSTID, which NCCL takes for its host if it is set
  char bus_id[32] = {};          // the PCI bus id of its GPU, the same for all parts of the GPU
  CudaUuid uuid = {};            // the same for two containers that share a GPU, and so seem to be two hosts
  char obstacle[400] = {};       // why it cannot use NCCL
  char no_kernels[200] = {};     // why it cannot scale sums by a kernel; empty: it can
};

// Returns whether the environment makes NCCL block in calls that this rank polls.
bool makes_nccl_block();

// The id of a communicator, or why NCCL could not create one.
struct CreatedId {
  Status status{SRT_OUT_OF_MEMORY, "no memory left for ncclGetUniqueId"};
  NcclUniqueId id = {};
};
CreatedId create_id(const GpuDevice& device);

// Gathers this rank's properties; `gpu` is nullptr if it has used none. `created`: the first member's id; nullptr
// elsewhere.
GpuFacts gather_facts(const Gpu* gpu, int32_t host, const CreatedId* created);

// Returns why members with these properties cannot use NCCL, in a sentence; "" if they can. `names`: by member.
// `encrypts`: traffic between hosts must be encrypted.
std::string obstacle_to_nccl(const std::vector<GpuFacts>& facts, const RankNames& names, bool encrypts);
// Likewise why they cannot scale sums by kernels. All must do so or none: NCCL's operators have to be equal.
std::string obstacle_to_kernels(const std::vector<GpuFacts>& facts, const RankNames& names);

// An all-gather of the members' properties over the CPU data plane, as the first phase of the plan of `whole`.
class BackendHandshake {
 public:
  BackendHandshake(const Transfer& whole, const GpuFacts& own);

  const std::shared_ptr<Transfer>& transfer() const { return transfer_; }
  const std::vector<GpuFacts>& facts() const { return facts_; }  // valid once the transfer is done

  static constexpr int32_t phases = 16;  // of the plan: more than an all-gather of so few bytes has

 private:
  std::vector<GpuFacts> facts_;  // by member
  GpuFacts own_;
  std::shared_ptr<Transfer> transfer_;
};

}  // namespace sirtaki
