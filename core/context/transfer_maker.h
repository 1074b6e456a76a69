// Conversion of a plan to a transfer: what all ranks agreed on, with this rank's memory.
#pragma once

#include "context/caller_state.h"
#include "data/operation.h"
#include "plan/plan.h"

namespace sirtaki {

class TransferMaker {
 public:
  TransferMaker(int32_t rank, SharedCallerState& state, const GpuChoice& gpu, bool averages_contributors)
      : rank_(rank), state_(state), gpu_(gpu), averages_contributors_(averages_contributors) {}

  // Fails when this rank cannot take part (no memory); the caller then fails the context.
  Status make(const Plan& plan, Transfer& transfer);

 private:
  // A tensor of the plan, and this rank's entry for it; nullptr where the rank has joined.
  struct TensorShare {
    const PlannedTensor& tensor;
    HandleEntry* entry;
    const uint8_t* input() const { return entry ? reinterpret_cast<const uint8_t*>(entry->input) : nullptr; }
    uint8_t* output() const { return entry ? reinterpret_cast<uint8_t*>(entry->output) : nullptr; }
  };

  HandleEntry* take_entry(const PlannedTensor& tensor, Status& status);
  void add_whole(const TensorShare& share, Transfer& transfer);
  void add_scattered(const TensorShare& share, Transfer& transfer);
  void add_sent(const TensorShare& share, Transfer& transfer);
  Status add_gathered(const TensorShare& share, Transfer& transfer);
  Status add_exchanged(const TensorShare& share, Transfer& transfer);
  Status allocate(const TensorShare& share, int64_t rows);
  Status allocate_memory(HandleEntry& entry) const;

  int32_t rank_;
  SharedCallerState& state_;
  const GpuChoice& gpu_;
  bool averages_contributors_;  // else an average divides by all members of the set, joined or not
};

}  // namespace sirtaki
