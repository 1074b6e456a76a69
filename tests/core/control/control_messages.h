// Messages in which every field is set.
#pragma once

#include "control_world.h"

namespace sirtaki {

template <typename Message>
Bytes bytes_of(const Message& message) {
  Bytes bytes;
  encode(message, bytes);
  return bytes;
}

inline Signature rich_signature() {
  Signature signature = in_group(in_set(allgather("grad.w\xc3\xa9", {3, 5}), 4), -9, 2);
  signature.dtype = DType::bfloat16;
  signature.reduce_op = ReduceOp::product;
  signature.device = 3;
  signature.priority = -7;
  signature.root = 2;
  signature.layout = 77;
  signature.prescale = 0.5;
  signature.postscale = -2.0;
  signature.splits = {1, 2, 0};
  return signature;
}

inline Signature signature_with_deadline() {
  Signature signature = allreduce("grad.w (round 3)");
  signature.deadline = Deadline{milliseconds(200), 2, 3};
  return signature;
}

inline StalledRankReport rich_rank_report() {
  return {1, true, "other", {{"evaluate", "train.py", 88}, {"main", "/home/user/train.py", 120}}};
}

inline Report rich_report() {
  Report report;
  report.last_decision = 12;
  report.goodbye = true;
  report.lapsed = 3;
  report.present = {CacheId{5} << 24, (CacheId{6} << 24) + 1};
  report.absent = {CacheId{7} << 24};
  report.full_requests = {{std::make_shared<Signature>(rich_signature()), true},
                          {std::make_shared<Signature>(add_set({0, 1, 2})), false},
                          {std::make_shared<Signature>(signature_with_deadline()), false}};
  report.joined = {0, 4};
  report.wait_report = rich_rank_report();
  return report;
}

inline Decision rich_decision() {
  Decision decision;
  decision.number = 13;
  decision.settings = {64 << 20, 1 << 20, 300'000, 0, 200'000, 2};
  decision.first_plan = 40;
  decision.plans = {{4, 2, true, {CacheId{5} << 24, is_response}}, {0, 2, false, {is_response}, {0, 3}}};
  decision.responses = {{std::make_shared<Signature>(rich_signature()), {3, 0, 9}, CacheId{8} << 24}};
  decision.refusals = {{0, Kind::broadcast, "x", {0, 2}, SRT_MISMATCH, "ranks disagree"}};
  decision.retired = {CacheId{1} << 24};
  decision.joins = {{4, 1}};
  decision.set_changes = {{5, "add", {0, 1}}, {4, "remove", {}}};
  decision.asked = {1, 2};
  decision.stalls = {{0, {"x", "y"}, 3, {1}, {0, 2}, 5, {rich_rank_report()}}};
  decision.stalls[0].is_over = true;
  decision.lateness = {{1, {4, 5'000, 3'000}}, {0, {1, 2, 2}}};
  decision.fatal = SRT_TIMEOUT;
  decision.fatal_text = "too late";
  decision.culprit = 2;
  return decision;
}

}  // namespace sirtaki
