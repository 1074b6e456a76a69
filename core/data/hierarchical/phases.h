// An operation that consists of transfers of other backends, its phases. Phases over the same medium run one after
// another, in the same order on all participants; phases over links run concurrently with phases through shared
// memory.
#pragma once

#include <array>
#include <vector>

#include "data/operation.h"

namespace sirtaki {

struct Phase {
  std::shared_ptr<Transfer> transfer;
  Backend* backend;
};

// The medium of a phase.
enum class Lane { local, between_hosts };
constexpr size_t lane_count = 2;

class PhasedOperation : public Operation {
 public:
  static constexpr int no_phase = -1;

  // Creates the operation in place of one phase of the plan, `whole`.
  explicit PhasedOperation(const Transfer& whole) : first_phase_(whole.phase), ends_plan_(whole.is_last_phase) {}

  Status advance(Nanoseconds now, Progress& progress) final;
  void cancel() final;
  bool is_quiet() const final;
  std::vector<int32_t> waits_for() const final;

 protected:
  // Adds a phase at the end of its lane, for the constructors of algorithms; it starts when phase `after` of the
  // other lane has ended. Returns its index in its lane.
  int add(Lane lane, Phase phase, int after = no_phase);

 private:
  struct PlannedPhase {
    Phase phase;
    int after;
  };
  struct LaneState {
    std::vector<PlannedPhase> phases;
    size_t ended = 0;
    std::unique_ptr<Operation> running;
  };

  Status advance_lane(size_t index, Nanoseconds now, bool& moved);

  const int32_t first_phase_;
  const bool ends_plan_;
  std::array<LaneState, lane_count> lanes_;
};

}  // namespace sirtaki
