// A whole negotiation in one thread: negotiators, a coordinator, and bytes that tests carry between them.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "control/coordinator/coordinator.h"
#include "control/messages/messages.h"
#include "control/rank/negotiator.h"

namespace sirtaki {

constexpr Nanoseconds start_time = seconds(7);

inline Signature changed(Signature signature, void (*change)(Signature&)) {
  change(signature);
  return signature;
}

inline Signature allreduce(const std::string& name, std::vector<int64_t> shape = {4}) {
  Signature signature;
  signature.name = name;
  signature.shape = std::move(shape);
  return signature;
}

inline Signature broadcast(const std::string& name, int32_t root = 0) {
  Signature signature = allreduce(name);
  signature.kind = Kind::broadcast;
  signature.root = root;
  return signature;
}

inline Signature allgather(const std::string& name, std::vector<int64_t> shape) {
  Signature signature = allreduce(name, std::move(shape));
  signature.kind = Kind::allgather;
  return signature;
}

inline Signature reducescatter(const std::string& name, std::vector<int64_t> shape = {4}) {
  Signature signature = allreduce(name, std::move(shape));
  signature.kind = Kind::reducescatter;
  return signature;
}

// Returns an all-to-all with as many rows as the sum of the splits.
inline Signature alltoall(const std::string& name, std::vector<int64_t> splits, int64_t extent = 3) {
  int64_t rows = 0;
  for (int64_t count : splits) rows += count;
  Signature signature = allreduce(name, {rows, extent});
  signature.kind = Kind::alltoall;
  signature.splits = std::move(splits);
  return signature;
}

inline Signature sending(const std::string& name, int32_t from, int32_t to) {
  Signature signature = allreduce(name);
  signature.kind = Kind::send;
  signature.root = from;
  signature.destination = to;
  return signature;
}

inline Signature barrier(const std::string& name) {
  Signature signature = allreduce(name, {});
  signature.kind = Kind::barrier;
  return signature;
}

inline Signature in_set(Signature signature, int32_t process_set) {
  signature.process_set = process_set;
  return signature;
}

inline Signature in_group(Signature signature, int64_t group_id, int32_t group_size) {
  signature.group_id = group_id;
  signature.group_size = group_size;
  return signature;
}

inline Signature add_set(std::vector<int64_t> ranks, const std::string& name = "add") {
  Signature signature = allreduce(name, std::move(ranks));
  signature.kind = Kind::add_process_set;
  return signature;
}

// An addition that only the set's own ranks submit.
inline Signature add_own_set(std::vector<int64_t> ranks, const std::string& name = "add") {
  Signature signature = add_set(std::move(ranks), name);
  signature.root = 1;
  return signature;
}

inline Signature remove_set(int32_t number, const std::string& name = "remove") {
  Signature signature = allreduce(name, {});
  signature.kind = Kind::remove_process_set;
  signature.root = number;
  return signature;
}

inline std::vector<std::string> rank_names(int32_t size) {
  std::vector<std::string> names;
  for (int32_t rank = 0; rank < size; ++rank) {
    names.push_back("rank " + std::to_string(rank) + " (pid " + std::to_string(70 + rank) + " on hostA)");
  }
  return names;
}

struct World {
  explicit World(int32_t size, CoordinatorRules rules = {}, ReportRule report_rule = {},
                 std::vector<int32_t> leaders = {})
      : coordinator(rank_names(size), rules, std::move(leaders)), outcomes(static_cast<size_t>(size)) {
    for (int32_t rank = 0; rank < size; ++rank) {
      negotiators.push_back(std::make_unique<Negotiator>(rank, size, report_rule, rules.cache_capacity));
    }
  }

  int32_t size() const { return static_cast<int32_t>(negotiators.size()); }

  Ticket submit(int32_t rank, const Signature& signature, bool absent = false) {
    negotiators[static_cast<size_t>(rank)]->submit({std::make_shared<Signature>(signature), ++last_ticket, absent},
                                                   now);
    return last_ticket;
  }

  void submit_all(const Signature& signature) {
    for (int32_t rank = 0; rank < size(); ++rank) submit(rank, signature);
  }

  void submit_from(std::initializer_list<int32_t> ranks, const Signature& signature) {
    for (int32_t rank : ranks) submit(rank, signature);
  }

  // Submits a request of its own on each of the first ranks.
  void submit_each(const std::vector<Signature>& by_rank) {
    for (size_t rank = 0; rank < by_rank.size(); ++rank) submit(static_cast<int32_t>(rank), by_rank[rank]);
  }

  Ticket join(int32_t rank, int32_t process_set = world_set) {
    negotiators[static_cast<size_t>(rank)]->join(process_set, ++last_ticket, now);
    return last_ticket;
  }

  void goodbye(int32_t rank) {
    Bytes bytes;
    negotiators[static_cast<size_t>(rank)]->goodbye(bytes);
    deliver(rank, bytes);
  }

  // Returns the report of one rank, for delivery.
  Bytes take_report(int32_t rank) {
    Bytes bytes;
    negotiators[static_cast<size_t>(rank)]->flush();
    negotiators[static_cast<size_t>(rank)]->report(now, bytes);
    CHECK(decode(bytes, last_report));
    return bytes;
  }

  void deliver(int32_t rank, const Bytes& bytes) {
    const Status status = coordinator.merge(rank, bytes, now);
    CHECK_EQUAL(std::string(status.text()), "");
  }

  void report(int32_t rank) { deliver(rank, take_report(rank)); }

  // Makes one Decision and applies it everywhere; every plan ends at once.
  bool decide() {
    Bytes bytes;
    for (Outcome& outcome : outcomes) outcome = {};
    if (!coordinator.decide(now, bytes)) return false;
    CHECK(decode(bytes, last_decision));
    for (int32_t rank = 0; rank < size(); ++rank) apply(rank, bytes);
    return true;
  }

  void apply(int32_t rank, const Bytes& bytes) {
    Negotiator& negotiator = *negotiators[static_cast<size_t>(rank)];
    Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    const Status status = negotiator.apply(bytes, outcome);
    CHECK_EQUAL(std::string(status.text()), "");
    for (const Plan& plan : outcome.plans) negotiator.plan_finished(plan.process_set);
  }

  // Reports stalls: the ranks that are asked for their state answer first.
  bool tell_stalls() {
    if (!decide()) return false;
    for (int32_t rank = 0; rank < size(); ++rank) {
      if (!outcome(rank).is_asked) continue;
      negotiators[static_cast<size_t>(rank)]->answer({rank, true, waits_for, frames});
      report(rank);
    }
    return decide();
  }

  // Lets every rank report, and makes one Decision.
  bool round() {
    for (int32_t rank = 0; rank < size(); ++rank) {
      if (negotiators[static_cast<size_t>(rank)]->report_due() != never) report(rank);
    }
    return decide();
  }

  const Outcome& outcome(int32_t rank) const { return outcomes[static_cast<size_t>(rank)]; }

  // Returns the text with which each of these ranks had exactly one request rejected; "" if a rank had none or another
  // text.
  std::string refusal(const std::vector<int32_t>& ranks, srt_status code) const {
    std::string text;
    for (int32_t rank : ranks) {
      const auto& refusals = outcome(rank).refusals;
      if (refusals.size() != 1 || refusals[0].status.code() != code) return "";
      if (rank != ranks[0] && text != refusals[0].status.text()) return "";
      text = refusals[0].status.text();
    }
    return text;
  }

  // Returns the names in a rank's plans: "a b | c".
  std::string plans(int32_t rank) const {
    std::string text;
    for (const Plan& plan : outcome(rank).plans) {
      if (!text.empty()) text += " |";
      for (const PlannedTensor& tensor : plan.tensors) text += (text.empty() ? "" : " ") + tensor.signature->name;
    }
    return text;
  }

  Coordinator coordinator;
  std::vector<std::unique_ptr<Negotiator>> negotiators;
  std::vector<Outcome> outcomes;
  Report last_report;
  Decision last_decision;
  std::string waits_for;            // the answer of the ranks that are asked
  std::vector<StackFrame> frames;
  Ticket last_ticket = 0;
  Nanoseconds now = seconds(100);
};

}  // namespace sirtaki
