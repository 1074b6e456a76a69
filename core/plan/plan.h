// What the negotiation decided, and the data plane executes: the only thing that control and data share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "observe/program_stack.h"
#include "observe/statistics.h"
#include "plan/request.h"

namespace sirtaki {

struct PlannedTensor {
  SignaturePtr signature;            // of a ragged kind: its rows are those of the coordinator's first reporter
  Ticket ticket = 0;                 // 0: this rank has joined and takes part with neutral elements
  std::vector<int64_t> rows;  // of ragged kinds: row_counts_each() a member, in member order (0: it has joined)
};

// One collective over one process set. All tensors agree in kind and device; what reduces, in reduce op, scales and
// dtype as well; a broadcast, in root.
struct Plan {
  uint64_t number = 0;  // one order over all sets, from 1
  int32_t process_set = world_set;
  Kind kind = Kind::allreduce;
  std::vector<int32_t> members;  // world ranks, ascending; of a send: the two
  int32_t contributors = 0;  // members that have not joined
  bool untouched = false;  // absent on every member: complete without touching anything
  std::vector<PlannedTensor> tensors;
};

// A request that ends without a plan: the ranks disagree, or a member has finished.
struct Refusal {
  Ticket ticket = 0;
  Status status;
};

// What a rank that keeps others waiting does instead.
struct Whereabouts {
  int32_t rank = 0;
  bool answers = true;               // false: not even sirtaki's own thread there did
  std::string waits_for;             // the tensor that it waits for itself
  std::vector<StackFrame> frames;    // of its main thread, innermost first, without sirtaki's own
  int32_t leader = -1;               // of one that does not answer: who reports for it; -1: nobody
};

// Who is late with what. The coordinator emits one a cause, and every rank hears of it.
struct Stall {
  int32_t process_set = world_set;
  std::vector<std::string> names;  // of tensors, at most 8
  int32_t more_names = 0;  // beyond those
  std::vector<int32_t> missing;  // ranks that have not submitted
  std::vector<int32_t> waiting;  // ranks that have
  int64_t seconds = 0;
  std::vector<Whereabouts> whereabouts;  // of the missing ones that were asked
  bool is_over = false;              // it was reported, and has ended: `missing` is the rank that came last
};

// How late a rank has been so far.
struct RankLateness {
  int32_t rank = 0;
  Lateness lateness;
};

struct JoinDone {
  int32_t process_set = world_set;
  Ticket ticket = 0;
  int32_t last_rank = 0;
};

struct ProcessSetChange {
  Ticket ticket = 0;  // of the add_process_set or remove_process_set request
  int32_t process_set = 0;
  std::vector<int32_t> members;  // empty: removed
};

// Everything that one Decision means to this rank, in the order in which it must happen.
struct Outcome {
  std::vector<Plan> plans;  // only those of which this rank is a member; ascending numbers
  std::vector<Refusal> refusals;
  std::vector<Stall> stalls;
  bool is_asked = false;             // the coordinator wants to know where this rank is: Member::answer
  std::vector<RankLateness> lateness;  // of those ranks for which it has changed
  std::vector<JoinDone> joins;
  std::vector<ProcessSetChange> process_sets;
  Status fatal;                      // not ok: the job cannot go on, because a deadline has passed
  int32_t culprit = 0;               // the rank that brought this about; of several late ones the first

  // Lists keep their room: a driver that polls clears this at every look.
  void clear() {
    plans.clear();
    refusals.clear();
    stalls.clear();
    is_asked = false;
    lateness.clear();
    joins.clear();
    process_sets.clear();
    fatal = Status::ok();
    culprit = 0;
  }
};

}  // namespace sirtaki
