// Observations of this rank, in the structs of the C header.
#pragma once

#include "base/clock.h"
#include "context/caller_state.h"
#include "sirtaki.h"

namespace sirtaki {

// Describes the totals so far. by_rank: nullptr, or room for one entry per rank.
void describe(const Statistics& counted, Nanoseconds now, srt_statistics& out, srt_lateness* by_rank);

// Describes the operations that have not ended, and the oldest one among them.
void describe(CallerState& state, Nanoseconds now, srt_activity& out);

}  // namespace sirtaki
