// The shared memory of a host in virtual time: transfers pass it in steps (memory_steps.h), each of which takes a
// modelled time, and waits for the steps of others.
#pragma once

#include <map>

#include "memory_steps.h"

namespace virtual_network {

// The work of a rank in virtual time, which its steps in shared memory share with the world.
struct RankTime {
  const Nanoseconds& now;
  Nanoseconds worked = 0;        // in the rank's present turn
  std::function<void()> publish;  // tells the other ranks of the host of a step that has ended
};

// A transfer in the steps of one member.
class SteppedOperation final : public Operation {
 public:
  // `ended`: the steps that each member has ended.
  SteppedOperation(const Transfer& transfer, const AllreduceCosts& costs, std::vector<int64_t>& ended, RankTime& time)
      : steps_(transfer, costs), own_(transfer.own), ended_(ended), time_(time) {}

  Status advance(Nanoseconds now, Progress& progress) override {
    progress = Progress::blocked;
    if (is_working_ && now >= ends_at_) {
      is_working_ = false;
      ++ended_[own_];
      progress = Progress::moved;
      time_.publish();
    }
    const int64_t step = ended_[own_];
    if (step == std::ssize(steps_.all())) progress = Progress::done;
    else if (!is_working_) begin(steps_.all()[static_cast<size_t>(step)]);
    return Status::ok();
  }

 private:
  void begin(const MemoryStep& step) {
    if (*std::min_element(ended_.begin(), ended_.end()) < step.needs) return;
    is_working_ = true;
    time_.worked += std::max<Nanoseconds>(step.takes, 1);  // even for no bytes: others wait for it
    ends_at_ = time_.now + time_.worked;
  }

  MemorySteps steps_;
  size_t own_;
  std::vector<int64_t>& ended_;
  RankTime& time_;
  bool is_working_ = false;
  Nanoseconds ends_at_ = 0;
};

// The steps that the members of a host's transfers have ended, by phase.
using HostSteps = std::map<int32_t, std::vector<int64_t>>;

// The backend of one rank for the transfers within its host.
class HostBackend final : public Backend {
 public:
  HostBackend(HostSteps& host, const AllreduceCosts& costs, RankTime& time) : host_(host), costs_(costs), time_(time) {}

  BackendName name(const Transfer&) const override { return BackendName::shared_memory; }
  bool serves(const Transfer&) const override { return true; }
  unsigned needs(const Transfer&) const override { return needs_slots; }
  std::unique_ptr<Operation> start(TransferPtr transfer) override {
    std::vector<int64_t>& ended = host_[transfer->phase];
    ended.resize(transfer->members.size());
    return std::make_unique<SteppedOperation>(*transfer, costs_, ended, time_);
  }

 private:
  HostSteps& host_;
  const AllreduceCosts& costs_;
  RankTime& time_;
};

}  // namespace virtual_network
