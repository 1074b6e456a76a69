// One transfer through NCCL: launched on the rank's stream for launches, then polled until it is over.
#pragma once

#include "data/kernels/kernels.h"
#include "gpu/device/gpu.h"
#include "gpu/nccl/communicator.h"
#include "gpu/nccl/nccl_call_list.h"
#include "gpu/nccl/reduction.h"

namespace sirtaki {

class NcclOperation final : public Operation {
 public:
  // `communicator`: nullptr for a single member that only copies.
  NcclOperation(Gpu& gpu, Communicator* communicator, const Kernels& kernels, TransferPtr transfer,
                const NcclReduction& reduction)
      : gpu_(gpu), communicator_(communicator), kernels_(kernels), transfer_(std::move(transfer)),
        reduction_(reduction), inputs_(transfer_->inputs) {}
  ~NcclOperation() override;

  Status advance(Nanoseconds now, Progress& progress) override;
  void cancel() override;
  bool is_quiet() const override;
  bool must_be_polled() const override { return true; }
  DeviceWait device_wait() const override;
  unsigned still_needs(unsigned) const override { return launched_ ? needs_nothing : needs_launches; }
  GpuEventPtr launched() const override { return launched_; }

 private:
  enum class Step { prepare, call, calling, launched };

  Status take_step();
  Status prepare();
  Status call();
  Status call_each();
  Status call_rooted(const NcclCallList::NcclCall& call);
  Status call_collective(const NcclCallList::NcclCall& call);
  Status finish_launch();
  Status scale_sums();
  Status copy_in();
  Status fill_with_neutral(const GpuCopy& copy);
  Status make_operator();
  void destroy_operator();

  Gpu& gpu_;
  Communicator* communicator_;
  const Kernels& kernels_;
  TransferPtr transfer_;
  NcclReduction reduction_;
  GpuInputs inputs_;
  Step step_ = Step::prepare;
  bool has_operator_ = false;
  NcclCallList calls_;
  MemoryBlock scratch_;
  std::vector<MemoryBlock> neutral_;  // host memory that is being copied
  GpuEventPtr launched_;
};

}  // namespace sirtaki
