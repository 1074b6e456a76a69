// The results of rounds that were decided without this rank because it was late (plan/request.h, Deadline). Each is
// kept until this rank submits the round, so that every rank receives every result, in order. The coordinator bounds
// their number: it waits for a rank that has missed `late_results` rounds of a name in a row.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "context/state/caller_state.h"
#include "plan/plan.h"

namespace sirtaki {

// Ends an operation whose result was computed without this rank's contribution.
void end_late(Ticket ticket, const std::vector<int32_t>& contributors, CallerState& state);

// For the driver only.
class LateResults {
 public:
  explicit LateResults(SharedCallerState& state) : state_(state) {}

  // Makes room for the result of a round. Fails if there is no memory.
  Status keep(const SignaturePtr& signature, const std::vector<int32_t>& contributors, uint8_t*& memory);

  // Records that the result of a round is there.
  void finished(const std::string& round);

  // Returns whether a request belongs to a round with a kept result. It then ends with that result, now or when it is
  // there.
  bool claim(const Request& request);

 private:
  struct Result {
    SignaturePtr signature;
    std::vector<int32_t> contributors;
    AlignedMemory memory;
    bool is_there = false;
    Ticket ticket = 0;  // the request that waits for it; 0: it was not submitted yet
  };

  void deliver(const Result& result);

  SharedCallerState& state_;
  std::unordered_map<std::string, Result> results_;  // by the name of the operation, which contains the round
};

}  // namespace sirtaki
