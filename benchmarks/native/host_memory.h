// The shared memory of a host in virtual time: transfers pass it in rounds of chunks, as the core's operations do
// (core/data/memory_reductions.cc, memory_movers.cc), and each step of a rank takes a modelled time.
#pragma once

#include <map>

#include "allreduce_costs.h"

namespace virtual_network {

// The work of a rank in virtual time, which its steps in shared memory share with the world.
struct RankTime {
  const Nanoseconds& now;
  Nanoseconds worked = 0;        // in the rank's present turn
  std::function<void()> publish;  // tells the other ranks of the host of a step that has ended
};

// A transfer in the steps of one member. Step 2r packs the chunk of round r; step 2r + 1 reduces or copies the chunks
// of all, which all must have packed. A slot is packed again when all have read it in this transfer.
class MemorySteps final : public Operation {
 public:
  // `ended`: the steps that each member has ended.
  MemorySteps(const Transfer& transfer, const AllreduceCosts& costs, std::vector<int64_t>& ended, RankTime& time)
      : rounds_(memory_rounds(transfer)), costs_(costs), ended_(ended), time_(time) {}

  Status advance(Nanoseconds now, Progress& progress) override {
    progress = Progress::blocked;
    if (is_working_ && now >= ends_at_) {
      is_working_ = false;
      ++ended_[rounds_.own];
      progress = Progress::moved;
      time_.publish();
    }
    const int64_t step = ended_[rounds_.own];
    if (step == 2 * rounds_.count()) progress = Progress::done;
    else if (!is_working_ && may_begin(step)) begin(step);
    return Status::ok();
  }

 private:
  bool may_begin(int64_t step) const {
    const int64_t needed = step % 2 ? step : step + 2 - 2 * SharedRegion::slots_each;
    return *std::min_element(ended_.begin(), ended_.end()) >= needed;
  }

  void begin(int64_t step) {
    is_working_ = true;
    time_.worked += std::max<Nanoseconds>(rounds_.time_of(step, costs_), 1);  // even for no bytes: others wait for it
    ends_at_ = time_.now + time_.worked;
  }

  MemoryRounds rounds_;
  const AllreduceCosts& costs_;
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
    return std::make_unique<MemorySteps>(*transfer, costs_, ended, time_);
  }

 private:
  HostSteps& host_;
  const AllreduceCosts& costs_;
  RankTime& time_;
};

}  // namespace virtual_network
