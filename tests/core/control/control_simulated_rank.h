// A rank of the simulation of control_simulation.h.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "control/relay/relay.h"
#include "control_program.h"

namespace sirtaki {

// How an operation ended on a rank.
enum class End { none, planned, refused, joined, changed };

struct Answer {
  End end = End::none;
  uint64_t plan = 0;
  int32_t value = 0;                 // a status code, the last rank that joined, or a process set
};

// A rank of the simulation: its negotiator, and what it has sent, received and been told.
struct SimulatedRank {
  SimulatedRank(int32_t own_number, int32_t size, ReportRule rule, const Mix& mix)
      : number(own_number), negotiator(own_number, size, rule, mix.cache_capacity) {}

  int32_t number;
  Negotiator negotiator;
  size_t line = 0;                   // the next line
  bool has_left = false;
  std::vector<int32_t> children;
  int32_t parent = 0;
  RankBits subtree;
  std::unique_ptr<Relay> relay;      // of a rank that reports for others
  std::deque<Bytes> up, down;
  std::deque<int32_t> unfinished_plans;
  std::map<Ticket, size_t> in_flight;
  std::map<size_t, Answer> answers;  // by line
  std::map<size_t, int32_t> sets{{0, world_set}};  // by the place of the line that added it, from 1
  std::map<uint64_t, std::string> plans;
  uint64_t last_plan = 0;
  Ticket last_ticket = 0;
};

// Checks that all ranks know a plan by the same text, that each tensor of it got what each contributor gave, and that
// plans are numbered without a gap.
struct PlanBook {
  void check(const std::vector<std::unique_ptr<SimulatedRank>>& ranks) {
    std::map<uint64_t, std::string> known;
    for (const auto& rank : ranks) {
      for (const auto& [number, text] : rank->plans) {
        const auto found = known.emplace(number, text).first;
        CHECK_EQUAL(text, found->second);
      }
    }
    for (const auto& [number, tensors] : contributions) {
      for (const auto& [name, count] : tensors) CHECK_EQUAL(count, contributors[number]);
    }
    if (!known.empty()) CHECK_EQUAL(known.rbegin()->first, known.size());
  }

  std::map<uint64_t, std::map<std::string, int32_t>> contributions;  // by plan and tensor
  std::map<uint64_t, int32_t> contributors;
};

}  // namespace sirtaki
