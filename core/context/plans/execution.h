// Execution of plans: turns each plan into a transfer with this rank's memory, passes it to the executor, and ends
// its handles when it is done.
#pragma once

#include <optional>
#include <unordered_map>

#include "context/plans/finite_check.h"
#include "context/state/caller_state.h"
#include "context/submission/late_results.h"
#include "control/rank/negotiator.h"
#include "data/executor.h"
#include "plan/plan.h"

namespace sirtaki {

struct ExecutionParts {
  int32_t rank;
  SharedCallerState& state;
  Negotiator& negotiator;
  const Timeline& timeline;
  const GpuChoice& gpu;
  FiniteCheck& finite_check;
};

class Execution {
 public:
  // `averages_contributors`: an average divides by the members that have not joined, not by all of the process set.
  Execution(const ExecutionParts& parts, bool averages_contributors)
      : parts_(parts), averages_contributors_(averages_contributors), late_results_(parts.state) {}

  Executor& executor() { return executor_; }
  LateResults& late_results() { return late_results_; }

  // Fails if this rank cannot take part any more (no memory); the caller then fails the context.
  Status start(const Plan& plan, Nanoseconds now);
  Status advance(Nanoseconds now, bool& moved);

  // Returns the name of the first tensor of a plan that has not finished, for messages.
  std::string tensor_of(uint64_t plan) const;

 private:
  struct Record {
    int32_t process_set;
    std::vector<Ticket> tickets;
    std::string first_name;
    Kind kind;
    int64_t bytes = 0;
    std::vector<int32_t> contributors = {};  // operations with a deadline only, as are the following
    bool is_late = false;
    std::string kept = {};  // the round whose result is kept
    TransferTimes times = {};
    WireBytes wire_bytes = {};
    NotFinite not_finite = {};
    TransferPtr transfer = nullptr;  // of a plan that moves tensors
  };

  // The backend that has moved a plan's bytes, and its algorithm.
  struct Way {
    BackendName backend = BackendName::none;
    const char* algorithm = "";
  };

  // A tensor of a plan, and this rank's entry for it; nullptr if the rank has joined.
  struct TensorShare {
    const PlannedTensor& tensor;
    HandleEntry* entry;
    bool is_late = false;     // its input is left out
    uint8_t* kept = nullptr;  // memory for a result without an entry
    const uint8_t* input() const {
      return entry && !is_late ? reinterpret_cast<const uint8_t*>(entry->input) : nullptr;
    }
    uint8_t* output() const { return entry ? reinterpret_cast<uint8_t*>(entry->output) : kept; }
  };

  // Turns a plan into a transfer. Fails if there is no memory.
  Status make_transfer(const Plan& plan, Transfer& transfer);
  void note_contributors(const Plan& plan, Record& record) const;
  Status leave_out(const Plan& plan, TensorShare& share);
  HandleEntry* take_entry(const PlannedTensor& tensor, Status& status);
  static void add_input(const HandleEntry& entry, Transfer& transfer);
  void add_whole(const TensorShare& share, Transfer& transfer);
  void add_scattered(const TensorShare& share, Transfer& transfer);
  void add_sent(const TensorShare& share, Transfer& transfer);
  Status add_gathered(const TensorShare& share, Transfer& transfer);
  Status add_exchanged(const TensorShare& share, Transfer& transfer);
  Status make_output(const TensorShare& share, int64_t rows, std::optional<int64_t> own_place);
  Status allocate_memory(HandleEntry& entry) const;

  void note_launches();
  std::string tensor_at(const Record& record, int64_t position) const;
  void finish(const Record& record, const Way& way, uint32_t result, Nanoseconds moment);

  ExecutionParts parts_;
  bool averages_contributors_;  // else an average divides by all members of the set, joined or not
  LateResults late_results_;
  Executor executor_;
  std::unordered_map<uint64_t, Record> records_;  // by plan number
  Executor::Changes changes_;
};

}  // namespace sirtaki
