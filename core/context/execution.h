// From plans to finished handles: fills a plan with this rank's memory, hands it to the executor, and ends the
// handles when it is done.
#pragma once

#include <unordered_map>

#include "context/handle_table.h"
#include "context/memory_ranges.h"
#include "control/member.h"
#include "data/executor.h"
#include "plan/plan.h"

namespace sirtaki {

class Execution {
 public:
  Execution(int32_t rank, HandleTable& handles, Member& member) : rank_(rank), handles_(handles), member_(member) {}

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

  Status fill(const Plan& plan, Transfer& transfer);
  Status fill_gather(const PlannedTensor& tensor, Entry* entry, Transfer& transfer);
  void finish(const Record& record, uint32_t result, Nanoseconds moment);

  int32_t rank_;
  HandleTable& handles_;
  Member& member_;
  Executor executor_;
  std::unordered_map<uint64_t, Record> records_;  // by plan number
  std::vector<uint64_t> finished_;
};

}  // namespace sirtaki
