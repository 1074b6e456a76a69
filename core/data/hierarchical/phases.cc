#include "data/hierarchical/phases.h"

namespace sirtaki {

int PhasedOperation::add(Lane lane, Phase phase, int after) {
  std::vector<PlannedPhase>& phases = lanes_[static_cast<size_t>(lane)].phases;
  phase.transfer->phase = first_phase_ + static_cast<int32_t>(phases.size());
  phase.transfer->is_last_phase = ends_plan_;
  if (!phases.empty()) phases.back().phase.transfer->is_last_phase = false;
  phases.push_back({std::move(phase), after});
  return static_cast<int>(phases.size()) - 1;
}

Status PhasedOperation::advance(Nanoseconds now, Progress& progress) {
  bool moved = false, done = true;
  for (size_t lane = 0; lane < lane_count; ++lane) SIRTAKI_TRY(advance_lane(lane, now, moved));
  for (const LaneState& lane : lanes_) done &= lane.ended == lane.phases.size();
  progress = done ? Progress::done : moved ? Progress::moved : Progress::blocked;
  return Status::ok();
}

Status PhasedOperation::advance_lane(size_t index, Nanoseconds now, bool& moved) {
  LaneState& lane = lanes_[index];
  const LaneState& other = lanes_[1 - index];
  if (lane.ended == lane.phases.size()) return Status::ok();
  PlannedPhase& next = lane.phases[lane.ended];
  Progress inner = Progress::done;
  if (!lane.running) {
    if (next.after >= static_cast<int>(other.ended)) return Status::ok();
    lane.running = next.phase.backend->start(next.phase.transfer);
    moved = true;
  }
  if (lane.running) SIRTAKI_TRY(lane.running->advance(now, inner));
  moved |= inner != Progress::blocked;
  if (inner != Progress::done) return Status::ok();
  lane.running.reset();
  next.phase.transfer.reset();
  ++lane.ended;
  return Status::ok();
}

void PhasedOperation::cancel() {
  for (const LaneState& lane : lanes_)
    if (lane.running) lane.running->cancel();
}

bool PhasedOperation::is_quiet() const {
  for (const LaneState& lane : lanes_)
    if (lane.running && !lane.running->is_quiet()) return false;
  return true;
}

std::vector<int32_t> PhasedOperation::waits_for() const {
  std::vector<int32_t> late;
  for (const LaneState& lane : lanes_)
    if (lane.running)
      for (int32_t rank : lane.running->waits_for()) late.push_back(rank);
  return late;
}

}  // namespace sirtaki
