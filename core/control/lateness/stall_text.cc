#include "control/lateness/stall_text.h"

#include <algorithm>

#include "control/operations/validation.h"

namespace sirtaki {
namespace {

constexpr size_t most_tensors_named = 3;

std::string list_tensors(const Stall& stall) {
  std::string text;
  const size_t named = std::min(stall.names.size(), most_tensors_named);
  for (size_t i = 0; i < named; ++i) text += (i ? ", " : "") + quoted(stall.names[i]);
  const size_t others = stall.names.size() - named + static_cast<size_t>(std::max(stall.more_names, 0));
  if (others) text += format(" (and %zu more)", others);
  return text;
}

// Names a single rank with its process and host, several ranks only by their numbers.
std::string name_waiting(const std::vector<int32_t>& ranks, const RankNames& names) {
  constexpr size_t most = 16;
  if (ranks.size() <= 1) return list_ranks(ranks, names);
  std::string text = "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), most); ++i) {
    if (i) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return ranks.size() > most ? text + format(" and %zu more", ranks.size() - most) : text;
}

// Returns the continuation of "rank 1 has not submitted it …".
std::string describe(const StalledRankReport& wait_report, bool are_several, const RankNames& names) {
  if (!wait_report.answers) {
    const std::string text = are_several ? " and do not answer. Are those processes stopped"
                                         : " and does not answer. Is that process stopped";
    if (wait_report.leader < 0) return text + "?";
    return text + ", or " + names[static_cast<size_t>(wait_report.leader)] + ", which reports for " +
           (are_several ? "them?" : "it?");
  }
  const std::string place = wait_report.frames.empty() ? "" : " " + name_place(wait_report.frames);
  if (!wait_report.waits_for.empty())
    return (are_several ? ": they wait for " : ": it waits for ") + quoted(wait_report.waits_for) + place;
  if (place.empty()) return "";
  return (are_several ? " and are" : " and is") + place;
}

struct AlikeRanks {
  StalledRankReport wait_report;
  std::vector<int32_t> ranks;
};

// Groups missing ranks with the same answer, so that they are named together.
std::vector<AlikeRanks> group_missing(const Stall& stall, const RankNames& names) {
  std::vector<AlikeRanks> groups;
  for (int32_t rank : stall.missing) {
    const auto told = std::find_if(stall.rank_reports.begin(), stall.rank_reports.end(),
                                   [&](const StalledRankReport& known) { return known.rank == rank; });
    const StalledRankReport wait_report = told == stall.rank_reports.end() ? StalledRankReport{} : *told;
    const std::string words = describe(wait_report, false, names);
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const AlikeRanks& known) {
      return describe(known.wait_report, false, names) == words;
    });
    if (group == groups.end()) groups.push_back({wait_report, {rank}});
    else group->ranks.push_back(rank);
  }
  return groups;
}

// Returns advice if nothing in the report points to a cause.
std::string advise(const Stall& stall) {
  const auto& told = stall.rank_reports;
  if (std::any_of(told.begin(), told.end(), [](const StalledRankReport& one) { return !one.waits_for.empty(); }))
    return ". The ranks have taken different branches: each has to make the same calls";
  if (std::all_of(told.begin(), told.end(),
                  [](const StalledRankReport& one) { return one.answers && one.frames.empty(); }))
    return ". Does every rank take the same branches, and make the same calls?";
  return "";
}

}  // namespace

std::string describe_stall(const Stall& stall, const RankNames& names) {
  if (stall.is_over)
    return format("%s came after %lld s: %s can go on", list_ranks(stall.missing, names).c_str(),
                  static_cast<long long>(stall.seconds), list_tensors(stall).c_str());
  const bool is_one = stall.names.size() + static_cast<size_t>(std::max(stall.more_names, 0)) == 1;
  std::string text = name_waiting(stall.waiting, names) + (stall.waiting.size() == 1 ? " waits for " : " wait for ") +
                     list_tensors(stall);
  for (const AlikeRanks& group : group_missing(stall, names)) {
    const bool are_several = group.ranks.size() > 1;
    text += "; " + list_ranks(group.ranks, names) + (are_several ? " have" : " has") + " not submitted " +
            (is_one ? "it" : "them") + describe(group.wait_report, are_several, names);
  }
  return text + advise(stall);
}

}  // namespace sirtaki
