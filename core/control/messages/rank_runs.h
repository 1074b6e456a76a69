// Ranks in ascending order, stored as runs of consecutive numbers. The ranks of a host, or of a subtree of hosts,
// form few runs, which are short on the wire.
#pragma once

#include <cstdint>
#include <vector>

#include "base/codec.h"

namespace sirtaki {

class RankRuns {
 public:
  void clear() { runs_.clear(); }

  // Adds a rank, which must be higher than all previous ones.
  void add(int32_t rank) {
    if (!runs_.empty() && runs_.back().first + runs_.back().count == rank) ++runs_.back().count;
    else runs_.push_back({rank, 1});
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Run& run : runs_)
      for (int32_t i = 0; i < run.count; ++i) visit(run.first + i);
  }

  int32_t count() const {
    int32_t total = 0;
    for (const Run& run : runs_) total += run.count;
    return total;
  }
  bool are_none() const { return runs_.empty(); }

  bool has(int32_t rank) const {
    for (const Run& run : runs_)
      if (rank >= run.first && rank < run.first + run.count) return true;
    return false;
  }

  bool has_all(const RankRuns& others) const {
    auto run = runs_.begin();
    for (const Run& other : others.runs_) {
      while (run != runs_.end() && run->first + run->count <= other.first) ++run;
      if (run == runs_.end() || other.first < run->first || other.first + other.count > run->first + run->count)
        return false;
    }
    return true;
  }

  void put(Writer& writer) const {
    writer.put(static_cast<uint32_t>(runs_.size()));
    for (const Run& run : runs_) {
      writer.put(run.first);
      writer.put(run.count);
    }
  }

  // Reads runs. Fails the reader unless they are ascending, as few as possible, and below the limit.
  void get(Reader& reader, int32_t limit) {
    const uint32_t count = reader.get_count(2 * sizeof(int32_t));
    runs_.clear();
    int32_t end = -1;
    for (uint32_t i = 0; i < count && reader.ok(); ++i) {
      const auto first = reader.get<int32_t>();
      const auto length = reader.get<int32_t>();
      if (first <= end || first >= limit || length < 1 || length > limit - first) return reader.fail();
      runs_.push_back({first, length});
      end = first + length;
    }
  }

  bool operator==(const RankRuns&) const = default;

 private:
  struct Run {
    int32_t first, count;
    bool operator==(const Run&) const = default;
  };
  std::vector<Run> runs_;
};

}  // namespace sirtaki
