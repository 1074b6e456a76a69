#include "control/operations/process_sets.h"

#include <algorithm>
#include <numeric>

namespace sirtaki {

ProcessSet::ProcessSet(int32_t set_number, std::vector<int32_t> set_members, int32_t world_size)
    : number(set_number), members(std::move(set_members)), bits(world_size), joined(world_size), finished(world_size) {
  for (int32_t rank : members) bits.add(rank);
}

size_t ProcessSet::position(int32_t rank) const {
  if (number == world_set) return static_cast<size_t>(rank);
  return static_cast<size_t>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

ProcessSets::ProcessSets(int32_t world_size) : world_size_(world_size) {
  std::vector<int32_t> world(static_cast<size_t>(world_size));
  std::iota(world.begin(), world.end(), 0);
  add(std::move(world));
}

ProcessSet* ProcessSets::find(int32_t number) const {
  if (number == world_set) return sets_.front().get();
  const auto found = std::lower_bound(sets_.begin(), sets_.end(), number,
                                      [](const auto& set, int32_t wanted) { return set->number < wanted; });
  return found != sets_.end() && (*found)->number == number ? found->get() : nullptr;
}

void ProcessSets::join(ProcessSet& set, int32_t rank, Nanoseconds now) {
  if (set.joined_count++ == 0) {
    ++joining_;
    set.first_joined = set.join_waits_since = now;
    set.next_stall_report = 0;
    set.is_join_reported = false;
  }
  set.joined.add(rank);
  set.last_joined = rank;
  set.has_changed = true;
}

void ProcessSets::unjoin(ProcessSet& set) {
  if (set.joined_count) --joining_;
  set.joined.clear();
  set.joined_count = 0;
}

Status ProcessSets::check_addition(const Signature& request) const {
  const std::vector<int64_t>& ranks = request.shape;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto rank = static_cast<long long>(ranks[i]);
    if (rank < 0 || rank >= world_size_)
      return Status(SRT_INVALID_ARGUMENT,
                    format("rank %lld is not in this job (ranks 0 to %d)", rank, world_size_ - 1));
    if (i > 0 && ranks[i] <= ranks[i - 1])
      return Status(SRT_INVALID_ARGUMENT,
                    format("a process set names each of its ranks once, in ascending order; rank %lld comes after %lld",
                           rank, static_cast<long long>(ranks[i - 1])));
  }
  if (ranks.empty()) return Status(SRT_INVALID_ARGUMENT, "a process set needs at least one rank");
  if (request.is_addition_by_members()) return {};
  for (const auto& set : sets_) {
    if (set->is_being_removed || set->is_of_its_members ||
        !std::equal(ranks.begin(), ranks.end(), set->members.begin(), set->members.end())) {
      continue;
    }
    return Status(SRT_INVALID_ARGUMENT, format("process set %d has these ranks already; use that one", set->number));
  }
  return {};
}

Status ProcessSets::check_removal(const Signature& request) const {
  if (request.root == world_set) {
    return Status(SRT_INVALID_ARGUMENT, "process set 0, of all ranks, cannot be removed");
  }
  const ProcessSet* set = find(request.root);
  if (set && !set->is_being_removed) return {};
  return Status(SRT_INVALID_ARGUMENT, format("there is no process set %d that could be removed", request.root));
}

ProcessSet& ProcessSets::add(std::vector<int32_t> members) {
  return *sets_.emplace_back(std::make_unique<ProcessSet>(next_number_++, std::move(members), world_size_));
}

void ProcessSets::remove(int32_t number) {
  unjoin(*find(number));
  std::erase_if(sets_, [&](const auto& set) { return set->number == number; });
}

}  // namespace sirtaki
