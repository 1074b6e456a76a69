// Checks that the members of a set agree on an operation, and the error texts if they do not, which are the same on
// all ranks.
#pragma once

#include <span>
#include <string>

#include "base/status.h"
#include "control/operations/operation_table.h"
#include "plan/plan.h"

namespace sirtaki {

// Returns "rank 0 (pid 70 on hostA), rank 2 (pid 72 on hostA)"; a long list ends with "... and 12 more ranks".
std::string list_ranks(std::span<const int32_t> ranks, const RankNames& names);

// Returns the name in quotes, shortened if it is long.
std::string quoted(const std::string& name);

// Shortens a text to longest_text, at a character boundary.
std::string bounded(std::string text);

// Returns ok if all ranks that submitted a complete entry can take part in one operation.
Status validate(const OperationEntry& entry, const RankNames& names);

// Returns the error for a late rank whose request does not agree with the round that was decided without it.
Status decided_differently(const Signature& decided, const Signature& own);

// Returns the error for a name that all members have submitted, but not for the same kind of operation.
Status kinds_differ(std::span<OperationEntry* const> same_name, const RankNames& names);

// Returns the error for an operation ("'grad.w'", "the join") that needs a rank that has left.
Status peer_finished(const RankBits& ranks, const std::string& operation, const RankNames& names);
Status peer_finished(const OperationEntry& entry, const RankNames& names);  // names its participants only

}  // namespace sirtaki
