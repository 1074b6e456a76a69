// The kinds of operations and their properties, one row per kind. Code that depends on a property reads this table,
// so that a new kind needs only a row, and code to move its data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sirtaki.h"

namespace sirtaki {

enum class Kind : uint8_t {
  allreduce = SRT_ALLREDUCE,
  broadcast = SRT_BROADCAST,
  allgather = SRT_ALLGATHER,
  barrier = SRT_BARRIER,
  reducescatter = SRT_REDUCESCATTER,
  alltoall = SRT_ALLTOALL,
  send = SRT_SEND,                              // from root to destination
  add_process_set = SRT_ADD_PROCESS_SET,        // shape holds the member ranks, ascending; root: who submits it
  remove_process_set = SRT_REMOVE_PROCESS_SET,  // root holds the set's number
  join = SRT_JOIN,                              // reported as a join, never as a request
};
constexpr Kind last_requested_kind = Kind::remove_process_set;

// The part of the result that is this rank's own.
enum class Output : uint8_t {
  none,
  whole,  // as large as the input
  rows,   // this member's share of the input's rows
  ragged  // rows whose number may differ between ranks: the size is known only from the plan
};

struct KindTraits {
  Kind kind;
  const char* name;   // in messages
  Output output;
  bool reduces;
  bool has_root;      // all members name the same root
  bool is_of_a_pair;  // two ranks of the set take part, root and destination
  bool has_splits;    // each member has row counts for every other one
  bool is_groupable;  // all members call it, so groups of it can complete
};

constexpr KindTraits kind_table[] = {
    // clang-format off
    //                                                  output          reduces root   pair   splits groupable
    {Kind::allreduce,          "all-reduce",            Output::whole,  true,   false, false, false, true},
    {Kind::broadcast,          "broadcast",             Output::whole,  false,  true,  false, false, true},
    {Kind::allgather,          "all-gather",            Output::ragged, false,  false, false, false, true},
    {Kind::barrier,            "barrier",               Output::none,   false,  false, false, false, true},
    {Kind::reducescatter,      "reduce-scatter",        Output::rows,   true,   false, false, false, true},
    {Kind::alltoall,           "all-to-all",            Output::ragged, false,  false, false, true,  true},
    {Kind::send,               "send",                  Output::whole,  false,  true,  true,  false, false},
    {Kind::add_process_set,    "add process set",       Output::none,   false,  false, false, false, false},
    {Kind::remove_process_set, "remove process set",    Output::none,   false,  true,  false, false, false},
    {Kind::join,               "join",                  Output::none,   false,  false, false, false, false},
    // clang-format on
};
constexpr size_t kind_count = sizeof kind_table / sizeof *kind_table;

constexpr bool kinds_are_in_order() {
  for (size_t i = 0; i < kind_count; ++i)
    if (static_cast<size_t>(kind_table[i].kind) != i) return false;
  return true;
}
static_assert(kinds_are_in_order(), "a row's position is its kind");

constexpr const KindTraits& traits(Kind kind) { return kind_table[static_cast<size_t>(kind)]; }

constexpr const char* kind_name(Kind kind) { return traits(kind).name; }
constexpr bool reduces(Kind kind) { return traits(kind).reduces; }
constexpr bool is_ragged(Kind kind) { return traits(kind).output == Output::ragged; }
constexpr bool changes_process_sets(Kind kind) {
  return kind == Kind::add_process_set || kind == Kind::remove_process_set;
}

// Returns whether tensors move between ranks: they have memory and a device, and several of them fuse into one plan.
constexpr bool moves_tensors(Kind kind) { return traits(kind).output != Output::none; }

// Returns whether the operation works along the first dimension, so that a tensor must have one.
constexpr bool cuts_rows(Kind kind) { return is_ragged(kind) || traits(kind).output == Output::rows; }

// Returns how many row counts each member of a ragged operation contributes: one, or one for each member.
constexpr size_t row_counts_each(Kind kind, size_t members) { return traits(kind).has_splits ? members : 1; }

}  // namespace sirtaki
