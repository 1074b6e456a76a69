// The messages of the negotiation, Reports and Decisions, and their encoding. Decoding checks every bound: for
// malformed bytes it returns false, and never crashes or allocates much.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/codec.h"
#include "control/messages/response_cache.h"
#include "plan/plan.h"

namespace sirtaki {

constexpr size_t longest_text = 1'500;  // bytes of a status text in a Decision

// A rank's notices besides its requests. They apply to the requests that the rank made before.
struct RankNotices {
  bool goodbye = false;
  uint32_t lapsed = 0;               // ids reported earlier that were retired before they were merged: each was
                                     // requested again in full, or its process set is gone
  std::vector<int32_t> joined;       // process sets
  std::optional<StalledRankReport> wait_report;  // the answer to Decision.asked

  bool are_none() const { return !goodbye && !lapsed && joined.empty() && !wait_report; }
  void append(RankNotices later);        // `later` is from the same rank
};

// A message from a rank to the coordinator, or to the leader that reports for it.
struct Report : RankNotices {
  struct FullRequest {
    SignaturePtr signature;
    bool absent = false;
  };

  uint64_t last_decision = 0;        // the last Decision that was applied
  std::vector<CacheId> present;
  std::vector<CacheId> absent;
  std::vector<FullRequest> full_requests;

  void clear();
};

// An operation that all ranks agreed on for the first time, or anew.
struct Response {
  SignaturePtr signature;
  std::vector<int64_t> rows;
  CacheId id = 0;                    // 0: not cached
};

// A tensor of a decided plan: a cache id, or the index of a response in the same Decision.
using PlanItem = uint64_t;
constexpr PlanItem is_response = PlanItem{1} << 63;

struct DecidedPlan {
  int32_t process_set = world_set;
  int32_t contributors = 0;
  bool untouched = false;
  std::vector<PlanItem> items;
  std::vector<int32_t> absentees = {};  // members that do not contribute; only for an operation with a deadline
};

struct DecidedRefusal {
  int32_t process_set = world_set;
  Kind kind = Kind::allreduce;
  std::string name;                  // empty: the join of this set
  std::vector<int32_t> ranks;        // the ranks whose requests are refused, ascending
  srt_status code = SRT_MISMATCH;
  std::string text;
};

struct DecidedJoin {
  int32_t process_set = world_set;
  int32_t last_rank = 0;
};

struct DecidedSetChange {
  int32_t process_set = 0;
  std::string name;                  // name of the request
  std::vector<int32_t> members;      // empty: removed
};

// A message from the coordinator to every rank.
struct Decision {
  uint64_t number = 0;               // from 1
  LiveValues settings;  // for its plans and later ones; empty: as before. Travels only with other content
  uint64_t first_plan = 0;  // the number of plans[0]; the others follow it
  std::vector<DecidedPlan> plans;
  std::vector<Response> responses;
  std::vector<DecidedRefusal> refusals;
  std::vector<CacheId> retired;
  std::vector<DecidedJoin> joins;
  std::vector<DecidedSetChange> set_changes;
  std::vector<int32_t> asked;  // ranks that must report what they are doing, because others wait for them
  std::vector<Stall> stalls;
  std::vector<RankLateness> lateness;  // travels only with other content
  srt_status fatal = SRT_OK;
  std::string fatal_text;
  int32_t culprit = 0;  // the rank that caused it; the first of several late ranks

  bool says_nothing() const;
  void clear();
};

void encode(const Report& report, Bytes& out);
void encode(const Decision& decision, Bytes& out);

// Each decodes into an existing message, overwriting its contents and reusing its memory.
bool decode(std::span<const uint8_t> bytes, Report& report);
bool decode(std::span<const uint8_t> bytes, Decision& decision);

// The errors for a message that is well-formed, but contradicts what its receiver knows.
Status nonsense_report(const std::string& what);
Status nonsense_decision(const std::string& what);

}  // namespace sirtaki
