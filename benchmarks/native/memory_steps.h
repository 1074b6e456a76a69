// The steps of a rank in a transfer through shared memory, as the core's operations take them
// (core/data/memory/memory_reductions.cc, memory_movers.cc), and the time of each.
#pragma once

#include "allreduce_costs.h"

namespace virtual_network {

struct MemoryStep {
  Nanoseconds takes;
  int64_t needs;  // steps that all members must have ended before
};

// The steps of one transfer.
class MemorySteps {
 public:
  MemorySteps(const Transfer& transfer, const AllreduceCosts& costs)
      : costs_(costs), members_(static_cast<int64_t>(transfer.members.size())), own_(transfer.own) {
    if (transfer.kind == Kind::reducescatter) scatter(transfer.outgoing);
    else if (transfer.kind == Kind::allgather) gather(transfer.incoming);
    else if (transfer.kind == Kind::allreduce) reduce(transfer.buffer.bytes());
    else must(false, "a transfer has no steps here");
  }

  const std::vector<MemoryStep>& all() const { return steps_; }

  // Returns the time of all steps, if no member waits.
  Nanoseconds sum() const {
    return std::accumulate(steps_.begin(), steps_.end(), Nanoseconds{0},
                           [](Nanoseconds sum, const MemoryStep& step) { return sum + step.takes; });
  }

 private:
  using Parts = std::vector<ScatterList>;

  // Packs in each round the others' shares of a chunk, and adds up its own one of all chunks.
  void scatter(const Parts& parts) {
    const int64_t share = costs_.chunk / members_ / 64 * 64;
    must(share > 0, "a host has too many ranks");
    for (int64_t round = 0; round < rounds(largest(parts), share); ++round) {
      const int64_t own = within(parts[own_], round, share);
      add_pair(costs_.copying(in_round(parts, round, share) - own), costs_.adding(members_ * own));
    }
  }

  // Packs in each round its own chunk, and copies those of the others.
  void gather(const Parts& parts) {
    for (int64_t round = 0; round < rounds(largest(parts), costs_.chunk); ++round) {
      const int64_t own = within(parts[own_], round, costs_.chunk);
      add_pair(costs_.copying(own), costs_.copying(in_round(parts, round, costs_.chunk) - own));
    }
  }

  // Packs its own chunk and adds up all, if there are two members, or few bytes. Otherwise packs a chunk, copies the
  // slices that others have reduced in the previous round, and reduces its own slice.
  void reduce(int64_t bytes) {
    constexpr int64_t few_bytes = 64 << 10;
    const bool is_whole = members_ == 2 || members_ * bytes <= few_bytes;
    const int64_t count = rounds(bytes, costs_.chunk);
    const auto in_round = [&](int64_t round) {
      return round < 0 ? 0 : std::clamp<int64_t>(bytes - round * costs_.chunk, 0, costs_.chunk);
    };
    for (int64_t round = 0; round < count + !is_whole; ++round) {
      const int64_t packed = in_round(round), reduced = in_round(round - 1);
      if (is_whole) {
        add_pair(costs_.copying(packed), costs_.adding(members_ * packed));
        continue;
      }
      const int64_t first = std::ssize(steps_), a_round = 3;
      steps_.push_back({costs_.copying(packed), first - (SharedRegion::slots_each - 1) * a_round + 2});
      steps_.push_back({costs_.copying(reduced - reduced / members_), first});
      steps_.push_back({costs_.adding(packed) + costs_.copying(packed / members_), first + 1});
    }
  }

  // Adds the steps of a round: packing, for which all must have read what the slot held, and reading.
  void add_pair(Nanoseconds packing, Nanoseconds reading) {
    const int64_t first = std::ssize(steps_), a_round = 2;
    steps_.push_back({packing, first - (SharedRegion::slots_each - 1) * a_round});
    steps_.push_back({reading, first + 1});
  }

  static int64_t rounds(int64_t bytes, int64_t each) { return std::max<int64_t>((bytes + each - 1) / each, 1); }

  static int64_t largest(const Parts& parts) {
    int64_t most = 0;
    for (const ScatterList& part : parts) most = std::max(most, part.bytes());
    return most;
  }

  static int64_t within(const ScatterList& part, int64_t round, int64_t each) {
    return std::clamp<int64_t>(part.bytes() - round * each, 0, each);
  }

  static int64_t in_round(const Parts& parts, int64_t round, int64_t each) {
    int64_t sum = 0;
    for (const ScatterList& part : parts) sum += within(part, round, each);
    return sum;
  }

  const AllreduceCosts& costs_;
  int64_t members_;
  size_t own_;
  std::vector<MemoryStep> steps_;
};

}  // namespace virtual_network
