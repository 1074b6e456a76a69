// Observations of this rank, in the structs of the C header.
#pragma once

#include "base/clock.h"
#include "context/failure/deadline_monitor.h"
#include "context/state/caller_state.h"
#include "observe/counters/tensor_times.h"
#include "sirtaki_observe.h"
#include "transport/links/sent_bytes.h"

namespace sirtaki {

// Describes the totals so far. by_rank: nullptr, or room for one entry per rank.
void describe(const Statistics& counted, Nanoseconds now, srt_statistics& out, srt_lateness* by_rank);

// Describes the training steps so far.
void describe(const StepCounters& counted, Nanoseconds now, srt_step_counts& out);

// Describe the counts that are not 0. `locations`: by rank; they must outlive what is returned.
std::vector<srt_operation_count> describe(const OperationCounts& counts);
std::vector<srt_sent_bytes> describe(const SentBytes& sent, const std::vector<RankLocation>& locations);

std::vector<srt_tensor_times> describe(const std::vector<TensorTimes>& tensors);

// Describes the operations that have not ended, and the oldest one among them.
void describe(CallerState& state, Nanoseconds now, srt_activity& out);

}  // namespace sirtaki
