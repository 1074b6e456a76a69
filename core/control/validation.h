// What the members of a set must agree on, and the sentences for when they do not: the same text on all ranks.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/pending.h"

namespace sirtaki {

// How messages name ranks: "rank 2 (pid 71 on hostB)", by rank.
using RankNames = std::vector<std::string>;

// "rank 0 (pid 70 on hostA), rank 2 (pid 72 on hostA)"; beyond a few: "... and 12 more ranks".
std::string list_ranks(std::span<const int32_t> ranks, const RankNames& names);

// The name in quotes, shortened if it is long.
std::string quoted(const std::string& name);

// Shortens a text to longest_text at a whole character.
std::string bounded(std::string text);

// Ok if everyone who submitted a complete entry can take part in one operation.
Status validate(const Entry& entry, const RankNames& names);

// Everyone has submitted this name, but not for the same kind of operation.
Status kinds_differ(std::span<Entry* const> same_name, const RankNames& names);

// Someone who is needed for an operation ("'grad.w'", "the join") has left.
Status peer_finished(const ProcessSet& set, const std::string& operation, const RankNames& names);

}  // namespace sirtaki
