// From plans to finished handles: hands each plan to the executor as a transfer, and ends the handles when it is done.
#pragma once

#include <unordered_map>

#include "context/handle_table.h"
#include "context/transfers.h"
#include "control/member.h"
#include "data/executor.h"
#include "plan/plan.h"

namespace sirtaki {

class Execution {
 public:
  // An average divides by the members of the process set, or only by those that have not joined.
  Execution(int32_t rank, HandleTable& handles, Member& member, const GpuChoice& gpu, bool averages_contributors)
      : handles_(handles), member_(member), maker_(rank, handles, gpu, averages_contributors) {}

  Executor& executor() { return executor_; }

  // Not ok when this rank cannot take part any more (no memory): the context is dead then.
  Status start(const Plan& plan, Nanoseconds now);
  Status advance(Nanoseconds now, bool& moved);

  // The name of the first tensor of a plan that has not finished, for messages.
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

  HandleTable& handles_;
  Member& member_;
  TransferMaker maker_;
  Executor executor_;
  std::unordered_map<uint64_t, Record> records_;  // by plan number
  Executor::Changes changes_;
};

}  // namespace sirtaki
