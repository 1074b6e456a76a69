// A Decision as text, without the parts that depend on the order in which reports arrive.
#pragma once

#include <map>
#include <set>
#include <string>

#include "control_world.h"

namespace sirtaki {

inline std::string key_text(const Signature& signature) {
  return signature.name + "/" + kind_name(signature.kind) + std::to_string(signature.process_set);
}

inline std::string text_of_item(PlanItem item, const Decision& decision, const std::map<CacheId, std::string>& cached) {
  if (!(item & is_response)) return cached.at(item) + " by id";
  const Response& response = decision.responses[item & ~is_response];
  const Signature& signature = *response.signature;  // of a ragged kind: its rows are those of the first rank to report
  const std::string shape = is_ragged(signature.kind) ? "" : check::show(signature.shape);
  return key_text(signature) + check::show(response.rows) + shape;
}

// Returns a Decision's text. `cached` gives the request behind every id, before this Decision.
inline std::string text_of(const Decision& decision, const std::map<CacheId, std::string>& cached) {
  std::set<std::string> parts;
  for (const DecidedPlan& plan : decision.plans) {
    std::string text = format("plan %d %d %d", plan.process_set, plan.contributors, plan.untouched);
    for (PlanItem item : plan.items) text += " " + text_of_item(item, decision, cached);
    parts.insert(text);
  }
  for (const DecidedRefusal& one : decision.refusals) {
    const std::string why = is_ragged(one.kind) ? std::to_string(one.code) : one.text;
    parts.insert(format("refusal %s %s %d ", one.name.c_str(), kind_name(one.kind), one.process_set) +
                 check::show(one.ranks) + why);
  }
  for (CacheId id : decision.retired) parts.insert("retired " + cached.at(id));
  for (const DecidedJoin& join : decision.joins) parts.insert(format("join %d", join.process_set));
  for (const DecidedSetChange& change : decision.set_changes)
    parts.insert(format("set %d ", change.process_set) + check::show(change.members));
  std::string text;
  for (const std::string& part : parts) text += part + "\n";
  return text;
}

}  // namespace sirtaki
