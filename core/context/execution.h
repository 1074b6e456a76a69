// Execution of plans: hands each plan to the executor as a transfer, and ends its handles when it is done.
#pragma once

#include <unordered_map>

#include "context/caller_state.h"
#include "context/transfer_maker.h"
#include "control/negotiator.h"
#include "data/executor.h"
#include "plan/plan.h"

namespace sirtaki {

class Execution {
 public:
  // `averages_contributors`: an average divides by the members that have not joined, not by all of the process set.
  Execution(int32_t rank, SharedCallerState& state, Negotiator& negotiator, const Timeline& timeline,
            const GpuChoice& gpu, bool averages_contributors)
      : state_(state), negotiator_(negotiator), timeline_(timeline), maker_(rank, state, gpu, averages_contributors) {}

  Executor& executor() { return executor_; }

  // Fails when this rank cannot take part any more (no memory); the caller then fails the context.
  Status start(const Plan& plan, Nanoseconds now);
  Status advance(Nanoseconds now, bool& moved);

  // Returns the name of the first tensor of a plan that has not finished, for messages.
  std::string tensor_of(uint64_t plan) const;

 private:
  struct Record {
    int32_t process_set;
    std::vector<Ticket> tickets;
    std::string first_name;
    TransferTimes times = {};
  };

  void note_launches();
  void finish(const Record& record, uint32_t result, Nanoseconds moment);

  SharedCallerState& state_;
  Negotiator& negotiator_;
  const Timeline& timeline_;
  TransferMaker maker_;
  Executor executor_;
  std::unordered_map<uint64_t, Record> records_;  // by plan number
  Executor::Changes changes_;
};

}  // namespace sirtaki
