// A random program that all ranks of a world run, with the ways in which it may fail.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "control_world.h"

namespace sirtaki {

struct Mix {
  uint32_t cache_capacity = 64;
  bool dissents = false;
  bool absents = false;
  bool joins = false;
  bool goodbyes = false;
  bool sets = false;
  bool groups = false;
  bool ragged = false;
  bool exchanges = false;              // reduce-scatters, all-to-alls, sends
  bool stalls = false;                 // waits are reported soon
};

// A mix of everything except stalls, which need time.
inline constexpr Mix everything{.dissents = true,
                                .absents = true,
                                .joins = true,
                                .goodbyes = true,
                                .sets = true,
                                .groups = true,
                                .ragged = true,
                                .exchanges = true};

// One line of the program. A set is named by the position of the line that added it, from 1; 0 is the world.
struct Line {
  enum class What { operation, join, add_set, remove_set } what = What::operation;
  size_t set = 0;
  std::vector<int32_t> members;        // of that set
  std::vector<Signature> signatures;   // by rank of the world
  std::vector<bool> absent;            // by rank
  std::vector<bool> takes_part;        // by rank; the other members have joined
  size_t group = 0;                    // distinguishes the uses of a group id
  bool is_uneven = false;
  bool must_fail = false;              // the ranks disagree
};

class Program {
 public:
  Program(int32_t size, const Mix& mix, uint32_t seed) : size_(size), mix_(mix), random_(seed) {
    sets_.push_back({0, all_ranks()});
    while (lines.size() < 60) add_something();
  }

  bool chance(uint32_t percent) { return random_() % 100 < percent; }
  uint32_t below(size_t limit) { return static_cast<uint32_t>(random_() % limit); }

  std::vector<Line> lines;

 private:
  struct Set {
    size_t place;                      // of the line that added it, from 1; 0: the world
    std::vector<int32_t> members;
    bool is_of_its_members = false;    // only they have added it, and only they know of it at once
  };

  std::vector<int32_t> all_ranks() const {
    std::vector<int32_t> ranks;
    for (int32_t rank = 0; rank < size_; ++rank) ranks.push_back(rank);
    return ranks;
  }

  void add_something() {
    const uint32_t dice = below(100);
    if (mix_.sets && dice < 6) return add_set_line();
    if (mix_.sets && dice < 9 && sets_.size() > 1) return remove_set_line();
    if (mix_.joins && dice < 16) return add_join();
    if (mix_.groups && dice < 30) return add_group();
    Line line = new_line(pick_set());
    if (mix_.exchanges && line.members.size() > 1 && chance(20)) make_send(line);
    else fill(line, "t" + std::to_string(below(8)), pick_kind());
    if (mix_.dissents && chance(15)) dissent(line);
    lines.push_back(std::move(line));
  }

  const Set& pick_set() { return sets_[chance(50) ? 0 : below(sets_.size())]; }

  Kind pick_kind() {
    if (mix_.ragged && chance(30)) return Kind::allgather;
    if (mix_.exchanges && chance(40)) return chance(50) ? Kind::reducescatter : Kind::alltoall;
    const Kind kinds[] = {Kind::allreduce, Kind::allreduce, Kind::broadcast, Kind::barrier};
    return kinds[below(4)];
  }

  Line new_line(const Set& set) const {
    Line line;
    line.set = set.place;
    line.members = set.members;
    line.signatures.resize(static_cast<size_t>(size_));
    line.absent.assign(static_cast<size_t>(size_), false);
    line.takes_part.assign(static_cast<size_t>(size_), false);
    for (int32_t rank : set.members) line.takes_part[static_cast<size_t>(rank)] = true;
    return line;
  }

  void fill(Line& line, const std::string& name, Kind kind) {
    const int64_t extent = chance(80) ? 4 : 5;
    for (int32_t rank : line.members) {
      Signature& signature = line.signatures[static_cast<size_t>(rank)];
      signature.name = name;
      signature.kind = kind;
      if (kind != Kind::barrier) signature.shape = {extent};
      if (kind == Kind::allgather) signature.shape = {chance(70) ? rank + 1 : static_cast<int32_t>(below(4)), extent};
      if (kind == Kind::alltoall) signature = alltoall(name, pick_splits(rank, line.members.size()), extent);
      if (kind == Kind::broadcast) signature.root = line.members[0];
      signature.priority = static_cast<int32_t>(name.size() * 3 + name.back()) % 3;
    }
    if (!mix_.absents || kind != Kind::allreduce || chance(60)) return;
    const bool on_all = chance(50);
    for (int32_t rank : line.members) line.absent[static_cast<size_t>(rank)] = on_all || chance(50);
  }

  std::vector<int64_t> pick_splits(int32_t rank, size_t members) {
    std::vector<int64_t> splits(members);
    const bool is_usual = chance(70);
    for (size_t to = 0; to < members; ++to) splits[to] = is_usual ? (static_cast<size_t>(rank) + to) % 3 : below(4);
    return splits;
  }

  // Makes a send from one of the set's members to another. As with callers' names, each pair has its own name.
  void make_send(Line& line) {
    const size_t from = below(line.members.size());
    const size_t to = (from + 1 + below(line.members.size() - 1)) % line.members.size();
    const int32_t pair[] = {line.members[from], line.members[to]};
    const std::string name = format("s%u (%d to %d)", below(2), pair[0], pair[1]);
    line.takes_part.assign(static_cast<size_t>(size_), false);
    for (int32_t rank : pair) {
      line.signatures[static_cast<size_t>(rank)] = sending(name, pair[0], pair[1]);
      line.takes_part[static_cast<size_t>(rank)] = true;
    }
  }

  void dissent(Line& line) {
    if (line.members.size() < 2) return;
    std::vector<size_t> able;
    for (size_t rank = 0; rank < line.takes_part.size(); ++rank)
      if (line.takes_part[rank]) able.push_back(rank);
    Signature& odd = line.signatures[able[below(able.size())]];
    if (odd.kind != Kind::send && chance(40)) {
      odd.kind = odd.kind == Kind::barrier ? Kind::allreduce : Kind::barrier;
    } else if (chance(50)) {
      odd.dtype = DType::float64;
    } else {
      odd.shape.push_back(7);
    }
    line.must_fail = true;
  }

  void add_group() {
    const Set& set = pick_set();
    const int32_t size = 1 + static_cast<int32_t>(below(3));
    const int64_t id = 10 + below(2);
    const bool fails = mix_.dissents && chance(25);
    const auto culprit = static_cast<int32_t>(below(static_cast<size_t>(size)));
    std::vector<Line> grouped;
    ++groups_;
    for (int32_t i = 0; i < size; ++i) {
      Line line = new_line(set);
      line.group = groups_;
      fill(line, "g" + std::to_string(id) + "." + std::to_string(i), Kind::allreduce);
      for (Signature& signature : line.signatures) {
        signature.group_id = id;
        signature.group_size = size;
      }
      if (fails && i == culprit && set.members.size() > 1) {
        Signature& odd = line.signatures[static_cast<size_t>(set.members.back())];
        odd.dtype = DType::int8;
        if (chance(40)) odd = barrier(odd.name);
      }
      line.must_fail = fails && set.members.size() > 1;
      grouped.push_back(std::move(line));
    }
    lines.insert(lines.end(), grouped.begin(), grouped.end());
  }

  Kind pick_uneven_kind() {
    if (mix_.ragged && chance(30)) return Kind::allgather;
    if (mix_.exchanges && chance(40)) return chance(50) ? Kind::reducescatter : Kind::alltoall;
    return Kind::allreduce;
  }

  // Adds a join: each rank has a different number of cached_requests left before it joins.
  void add_join() {
    const Set set = pick_set();
    std::vector<uint32_t> cached_requests(static_cast<size_t>(size_));
    for (uint32_t& count : cached_requests) count = below(4);
    for (uint32_t batch = 0; batch < 4; ++batch) {
      Line line = new_line(set);
      fill(line, "u" + std::to_string(lines.size()), pick_uneven_kind());
      line.is_uneven = true;
      for (size_t rank = 0; rank < cached_requests.size(); ++rank) {
        if (cached_requests[rank] <= batch) line.takes_part[rank] = false;
      }
      lines.push_back(std::move(line));
    }
    Line join = new_line(set);
    join.what = Line::What::join;
    lines.push_back(std::move(join));
  }

  void add_set_line() {
    std::vector<int64_t> ranks;
    for (int32_t rank = 0; rank < size_; ++rank) {
      if (chance(60)) ranks.push_back(rank);
    }
    std::vector<int32_t> members(ranks.begin(), ranks.end());
    const bool by_members = !members.empty() && chance(40);
    const bool is_known = !by_members && std::any_of(sets_.begin(), sets_.end(), [&](const Set& set) {
      return set.members == members && !set.is_of_its_members;
    });
    Line line = new_line(sets_[0]);
    line.what = Line::What::add_set;
    line.must_fail = members.empty() || is_known;
    for (Signature& signature : line.signatures) {
      const std::string name = "add" + std::to_string(lines.size());
      signature = by_members ? add_own_set(ranks, name) : add_set(ranks, name);
    }
    if (by_members) {
      line.takes_part.assign(static_cast<size_t>(size_), false);
      for (int32_t rank : members) line.takes_part[static_cast<size_t>(rank)] = true;
    }
    if (!line.must_fail) sets_.push_back({lines.size() + 1, std::move(members), by_members});
    lines.push_back(std::move(line));
  }

  void remove_set_line() {
    const size_t chosen = 1 + below(sets_.size() - 1);
    if (sets_[chosen].is_of_its_members) return;
    Line line = new_line(sets_[0]);
    line.what = Line::What::remove_set;
    line.set = sets_[chosen].place;
    for (Signature& signature : line.signatures) signature = remove_set(0, "remove" + std::to_string(lines.size()));
    sets_.erase(sets_.begin() + static_cast<std::ptrdiff_t>(chosen));
    lines.push_back(std::move(line));
  }

  int32_t size_;
  Mix mix_;
  std::mt19937 random_;
  std::vector<Set> sets_;
  size_t groups_ = 0;
};

}  // namespace sirtaki
