// The backend for process sets of one rank: there is nothing to exchange, only to copy and to scale.
#pragma once

#include "data/operation.h"

namespace sirtaki {

class SingleRankBackend final : public Backend {
 public:
  explicit SingleRankBackend(const Kernels& kernels) : kernels_(kernels) {}
  BackendName name(const Transfer&) const override { return BackendName::single_rank; }
  bool serves(const Transfer& transfer) const override { return transfer.device < 0 && transfer.members.size() == 1; }
  std::unique_ptr<Operation> start(TransferPtr transfer) override;
  unsigned needs(const Transfer&) const override { return needs_nothing; }

 private:
  const Kernels& kernels_;
};

}  // namespace sirtaki
