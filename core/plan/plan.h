// The result of the negotiation, which the data plane executes: the only part that control and data share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/settings/live_settings.h"
#include "base/status.h"
#include "observe/counters/statistics.h"
#include "observe/records/program_stack.h"
#include "plan/request.h"

namespace sirtaki {

// Names of ranks in messages: "rank 2 (pid 71 on hostB)", by rank.
using RankNames = std::vector<std::string>;

struct PlannedTensor {
  SignaturePtr signature;            // ragged kinds: rows are those of the first request at the coordinator
  Ticket ticket = 0;                 // 0: this rank has joined, or is late, and takes part with neutral elements
  std::vector<int64_t> rows;  // ragged kinds only: row_counts_each() per member, in member order (0: it has joined)
  bool is_kept = false;  // this rank is late: the result is kept until it submits this round
};

// One collective over one process set. All tensors have the same kind and device; for reductions also the same reduce
// op, scales and dtype; for broadcasts the same root.
struct Plan {
  uint64_t number = 0;  // a single order over all sets, from 1
  int32_t process_set = world_set;
  Kind kind = Kind::allreduce;
  std::vector<int32_t> members;  // world ranks, ascending; for a send its two ranks
  int32_t contributors = 0;  // members that take part with data: they have not joined, and are not late
  std::vector<int32_t> absentees;  // operations with a deadline only: members that do not contribute, ascending
  bool untouched = false;  // absent on every member: completes without touching memory
  int64_t chunk_bytes = 0;  // through shared memory; 0: as large as the region allows
  std::vector<PlannedTensor> tensors;
};

// A request that ends without a plan: the ranks disagree, or a member has finished.
struct Refusal {
  Ticket ticket = 0;
  Status status;
};

// The answer of a rank that delays others: what it is doing.
struct StalledRankReport {
  int32_t rank = 0;
  bool answers = true;               // false: sirtaki's own thread on that rank did not answer either
  std::string waits_for;             // the tensor that the rank itself waits for
  std::vector<StackFrame> frames;    // frames of its main thread, innermost first, without sirtaki's own
  int32_t leader = -1;               // for a rank that does not answer: the rank that reports for it; -1: none
};

// A stall: the late ranks and their tensors. The coordinator emits one per cause, and every rank receives it.
struct Stall {
  int32_t process_set = world_set;
  std::vector<std::string> names;  // names of tensors, at most 8
  int32_t more_names = 0;  // number of further names
  std::vector<int32_t> missing;  // ranks that have not submitted
  std::vector<int32_t> waiting;  // ranks that have submitted
  int64_t seconds = 0;
  std::vector<StalledRankReport> rank_reports;  // answers of the missing ranks that were asked
  bool is_over = false;              // it was reported, and has ended: `missing` is the last rank to submit
};

// The lateness of a rank so far.
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
  Ticket ticket = 0;  // ticket of the add_process_set or remove_process_set request
  int32_t process_set = 0;
  std::vector<int32_t> members;  // empty: the set was removed
};

// The consequences of one Decision for this rank, in the order in which they must be applied.
struct Outcome {
  LiveValues settings;  // from now on; empty: as before. The plans have theirs already
  std::vector<Plan> plans;  // only plans of which this rank is a member; ascending numbers
  std::vector<Refusal> refusals;
  std::vector<Stall> stalls;
  bool is_asked = false;             // the coordinator asks what this rank is doing: Negotiator::answer
  std::vector<RankLateness> lateness;  // only ranks for which it has changed
  std::vector<JoinDone> joins;
  std::vector<ProcessSetChange> process_sets;
  Status fatal;                      // not ok: the job cannot continue, because a deadline has passed
  int32_t culprit = 0;               // the rank that caused it; of several late ranks the first

  // Clears the outcome. Lists keep their capacity, because this is called in every iteration.
  void clear() {
    settings.clear();
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
