// Looks for infinities and NaNs in what this rank adds to sums over the ranks, before another rank receives them: one
// value spreads to all parameters of all ranks within a step. Only tensors in the memory of the CPU are looked at.
#pragma once

#include <string>

#include "base/log.h"
#include "base/settings/knobs.h"
#include "context/state/caller_state.h"
#include "context/state/own_rank.h"
#include "data/operation.h"
#include "observe/records/program_stack.h"

namespace sirtaki {

struct FiniteCheckParts {
  OwnRank own;
  const Kernels& kernels;
  SharedCallerState& state;
  ProgramStack& program_stack;
  const Log& log;
};

class FiniteCheck {
 public:
  FiniteCheck(const FiniteCheckParts& parts, const Config& config);

  // Looks at this rank's tensor before another rank receives it, where the sum itself does not find such values, or
  // would find them too late. Fails if the value ends the job.
  Status look(const Transfer& transfer, const Signature& signature, const uint8_t* input);
  // Returns whether the sum itself is to note the first such value.
  bool wants_notes(const Transfer& transfer) const;
  // Reports what a finished plan has noted, unless another rank does, or an earlier sum may have brought the value.
  void report(const NotFinite& found, const std::string& tensor, const Transfer& transfer);
  // Looks at the first elements of a finished sum: what this rank adds later may come from there.
  void look_at_sum(const Transfer& transfer);

 private:
  enum class Reaction { say, stop, off };  // in the order of the setting's choices

  bool is_looking() const { return reaction_ != Reaction::off && !is_told_; }
  bool finds_in_sum(const Transfer& transfer) const;
  FiniteKernel kernel_for(const Transfer& transfer) const;
  bool is_first(const NotFinite& found, const Transfer& transfer) const;
  std::string describe(const NotFinite& found, const std::string& tensor, size_t members) const;

  FiniteCheckParts parts_;
  Reaction reaction_;
  bool is_told_ = false;  // or nothing is left to tell: another rank's value has spread to this one
};

}  // namespace sirtaki
