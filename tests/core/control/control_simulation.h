// The simulation of a program that every rank of a world runs, with arbitrary delays of reports and Decisions. It
// checks that every request is answered once and alike everywhere. Ranks report to rank 0, or up a tree of any shape.
#pragma once

#include <deque>
#include <map>
#include <set>

#include "control_program.h"
#include "control_simulated_rank.h"
#include "control_text.h"

namespace sirtaki {

class Simulation {
 public:
  // Creates the ranks. parents[r] is the rank to which rank r reports; it is lower than r.
  Simulation(int32_t size, const Mix& mix, uint32_t seed, const std::vector<int32_t>& parents = {})
      : mix_(mix), program_(size, mix, seed),
        rule_{.bytes = 64, .window = microseconds(50), .plans_in_flight = 1 + static_cast<int32_t>(seed % 3)},
        coordinator_(rank_names(size), rules()) {
    for (int32_t rank = 0; rank < size; ++rank) ranks_.push_back(std::make_unique<Rank>(rank, size, rule_, mix));
    for (int32_t rank = 1; rank < size; ++rank) ranks_[0]->children.push_back(rank);
    if (!parents.empty()) grow_tree(parents, microseconds(seed % 5 * 40));
    if (mix.goodbyes) {
      leaver_ = static_cast<int32_t>(program_.below(ranks_.size()));
      leaves_at_ = program_.below(program_.lines.size());
    }
  }

  void run() {
    while (!is_over() && steps_ < 400'000) {
      act(*ranks_[program_.below(ranks_.size())], program_.below(100));
      if (is_tree_ && program_.chance(30)) gather(*ranks_[program_.below(ranks_.size())]);
    }
    CHECK(is_over());
    check_end();
  }

  // Runs in rounds: every rank advances as far as it can, all reports arrive, and one Decision follows. Returns what
  // each one decided.
  std::vector<std::string> run_in_rounds() {
    std::vector<std::string> rounds;
    while (!is_over() && steps_ < 10'000) {
      for (auto& rank : ranks_) run_round(*rank);
      for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) {  // children before their parents
        now_ += milliseconds(1);                                          // longer than any report is held
        gather(**rank);
        while (!(*rank)->up.empty()) arrive(**rank);
      }
      decided_.clear();
      decide();
      rounds.push_back(decided_);
      for (auto& rank : ranks_) {
        while (!rank->down.empty()) hear(*rank);
        while (!rank->unfinished_plans.empty()) finish_plan(*rank);
      }
    }
    CHECK(is_over());
    check_end();
    return rounds;
  }

  size_t steps() const { return steps_; }
  size_t stalls() const { return stalls_; }

 private:
  using Rank = SimulatedRank;
  static constexpr int32_t nobody = -1;

  CoordinatorRules rules() const {
    return {.fusion_threshold = 40,
            .cache_capacity = mix_.cache_capacity,
            .stall_report = mix_.stalls ? microseconds(100) : seconds(5)};
  }

  void grow_tree(const std::vector<int32_t>& parents, Nanoseconds hold) {
    is_tree_ = true;
    ranks_[0]->children.clear();
    std::vector<std::vector<int32_t>> subtrees(ranks_.size());
    for (auto number = static_cast<int32_t>(ranks_.size()) - 1; number > 0; --number) {
      Rank& rank = *ranks_[static_cast<size_t>(number)];
      std::vector<int32_t>& own = subtrees[static_cast<size_t>(number)];
      own.push_back(number);
      std::sort(own.begin(), own.end());
      rank.parent = parents[static_cast<size_t>(number)];
      rank.subtree = RankBits(static_cast<int32_t>(ranks_.size()));
      for (int32_t below : own) rank.subtree.add(below);
      const auto size = static_cast<int32_t>(ranks_.size());
      if (own.size() > 1) rank.relay = std::make_unique<Relay>(own, size, RelayRule{hold}, mix_.cache_capacity);
      std::vector<int32_t>& above = subtrees[static_cast<size_t>(rank.parent)];
      above.insert(above.end(), own.begin(), own.end());
      ranks_[static_cast<size_t>(rank.parent)]->children.push_back(number);
    }
  }

  bool is_over() const {
    for (const auto& rank : ranks_) {
      if (rank->relay && rank->relay->report_due() != never) return false;
      const bool is_idle = rank->has_left || (rank->line == program_.lines.size() && rank->in_flight.empty());
      if (!is_idle || !rank->up.empty() || !rank->down.empty() || !rank->unfinished_plans.empty()) return false;
    }
    return true;
  }

  void act(Rank& rank, uint32_t dice) {
    ++steps_;
    now_ += program_.below(static_cast<size_t>(microseconds(20)));
    if (dice < 35) return advance(rank);
    if (dice < 37) return rank.negotiator.flush();
    if (dice < 52) return report(rank);
    if (dice < 68) return arrive(rank);
    if (dice < 78) return decide();
    if (dice < 92) return hear(rank);
    finish_plan(rank);
  }

  // Runs the rank's next line if it may run.
  void advance(Rank& rank) {
    if (rank.has_left || rank.line == program_.lines.size()) return;
    if (rank.number == leaver_ && rank.line >= leaves_at_) return leave(rank);
    const Line& line = program_.lines[rank.line];
    if (line.takes_part[static_cast<size_t>(rank.number)]) {
      if (!rank.sets.contains(line.set)) return;  // the answer to its addition is on its way
      const int32_t set = rank.sets[line.set];
      if (set != refused_set) {
        if (must_wait(rank, line)) return;
        start(rank, line, set);
      }
    }
    ++rank.line;
  }

  void leave(Rank& rank) {
    if (program_.chance(50) && !rank.in_flight.empty()) return;
    rank.has_left = true;
    Bytes bytes;
    rank.negotiator.goodbye(bytes);
    send(rank, std::move(bytes));
  }

  // Returns whether a line must wait, because callers ensure: one operation per name at a time, nothing in a joined
  // set, one use of a group id.
  bool must_wait(const Rank& rank, const Line& line) const {
    const Signature& own = line.signatures[static_cast<size_t>(rank.number)];
    for (const auto& [ticket, place] : rank.in_flight) {
      const Line& other = program_.lines[place];
      if (where(other) != where(line)) continue;
      if (other.what == Line::What::join) return true;
      const Signature& theirs = other.signatures[static_cast<size_t>(rank.number)];
      if (theirs.name == own.name || (line.group && other.group != line.group && theirs.group_id == own.group_id)) {
        return true;
      }
    }
    return false;
  }

  // Returns the set that a line's request belongs to.
  static size_t where(const Line& line) { return line.what == Line::What::remove_set ? 0 : line.set; }

  void start(Rank& rank, const Line& line, int32_t set) {
    const Ticket ticket = ++rank.last_ticket;
    rank.in_flight[ticket] = rank.line;
    if (line.what == Line::What::join) {
      return rank.negotiator.join(set, ticket, now_);
    }
    Signature signature = line.signatures[static_cast<size_t>(rank.number)];
    if (line.what == Line::What::operation) signature.process_set = set;
    if (line.what == Line::What::operation && signature.kind == Kind::broadcast) signature.root = line.members[0];
    if (line.what == Line::What::remove_set) signature.root = set;
    rank.negotiator.submit(
        {std::make_shared<Signature>(std::move(signature)), ticket, line.absent[static_cast<size_t>(rank.number)]},
        now_);
  }

  void report(Rank& rank) {
    if (rank.has_left || rank.negotiator.report_due() > now_) return;
    Bytes bytes;
    rank.negotiator.report(now_, bytes);
    send(rank, std::move(bytes));
  }

  // Sends a report. A rank that reports for others merges its own report first.
  void send(Rank& rank, Bytes report) {
    if (!rank.relay) return rank.up.push_back(std::move(report));
    const Status status = rank.relay->merge(rank.number, report, now_);
    CHECK_EQUAL(std::string(status.text()), "");
  }

  void gather(Rank& rank) {
    if (rank.relay && rank.relay->report_due() <= now_) rank.relay->report(now_, rank.up.emplace_back());
  }

  void arrive(Rank& rank) {
    if (rank.up.empty()) return;
    const Status status = deliver(rank, rank.up.front());
    CHECK_EQUAL(std::string(status.text()), "");
    rank.up.pop_front();
  }

  Status deliver(const Rank& from, const Bytes& bytes) {
    Rank& parent = *ranks_[static_cast<size_t>(from.parent)];
    if (from.relay && parent.relay) return parent.relay->merge_aggregate(from.subtree, bytes, now_);
    if (from.relay) return coordinator_.merge_aggregate(from.number, from.subtree, bytes, now_);
    return parent.relay ? parent.relay->merge(from.number, bytes, now_) : coordinator_.merge(from.number, bytes, now_);
  }

  void run_round(Rank& rank) {
    size_t line = 0;
    do {
      ++steps_;
      line = rank.line;
      advance(rank);
    } while (rank.line != line);
    rank.negotiator.flush();
    report(rank);
  }

  void decide() {
    Bytes bytes;
    if (!coordinator_.decide(now_, bytes)) return;
    Decision decision;
    CHECK(decode(bytes, decision));
    CHECK_EQUAL(decision.number, ++decisions_);
    decided_ = text_of(decision, cached_);
    check_cache(decision);
    ranks_[0]->down.push_back(bytes);
    if (!is_tree_) pass_on(*ranks_[0], bytes);
  }

  void pass_on(const Rank& rank, const Bytes& bytes) {
    for (int32_t child : rank.children) ranks_[static_cast<size_t>(child)]->down.push_back(bytes);
  }

  // Maintains a model of every rank's cache, and checks it.
  void check_cache(const Decision& decision) {
    for (CacheId id : decision.retired) CHECK_EQUAL(cached_.erase(id), 1u);
    for (const Response& response : decision.responses) {
      if (!response.id) continue;
      CHECK(ids_seen_.insert(response.id).second);
      const std::string key = key_text(*response.signature);
      for (const auto& [id, known] : cached_) CHECK(known != key);
      cached_[response.id] = key;
    }
    CHECK(cached_.size() <= mix_.cache_capacity);
  }

  void hear(Rank& rank) {
    if (rank.down.empty()) return;
    Outcome outcome;
    if (is_tree_) pass_on(rank, rank.down.front());
    if (rank.relay) CHECK_EQUAL(std::string(rank.relay->forward(rank.down.front()).text()), "");
    const Status status = rank.negotiator.apply(rank.down.front(), outcome);
    CHECK_EQUAL(std::string(status.text()), "");
    rank.down.pop_front();
    CHECK((mix_.stalls || outcome.stalls.empty()) && outcome.fatal.is_ok());
    for (const Stall& stall : outcome.stalls) check_stall(stall);
    if (outcome.is_asked && !rank.has_left) {
      rank.negotiator.answer({rank.number, true, "itself", {}});
      CHECK_EQUAL(rank.negotiator.report_due(), 0);
      report(rank);
    }
    for (const Plan& plan : outcome.plans) hear_plan(rank, plan);
    for (const Refusal& refusal : outcome.refusals) {
      CHECK(!contains(refusal.status.text(), "\n") && refusal.status.text()[0]);
      answer(rank, refusal.ticket, {End::refused, 0, refusal.status.code()});
    }
    for (const JoinDone& join : outcome.joins) answer(rank, join.ticket, {End::joined, 0, join.last_rank});
    for (const ProcessSetChange& change : outcome.process_sets) hear_set_change(rank, change);
  }

  void check_stall(const Stall& stall) {
    CHECK(!stall.names.empty() && !stall.missing.empty());
    for (int32_t rank : stall.missing) {
      CHECK(std::find(stall.waiting.begin(), stall.waiting.end(), rank) == stall.waiting.end());
    }
    for (const StalledRankReport& one : stall.rank_reports) {
      CHECK(std::find(stall.missing.begin(), stall.missing.end(), one.rank) != stall.missing.end());
    }
    stalls_ += 1;
  }

  void hear_plan(Rank& rank, const Plan& plan) {
    CHECK(plan.number > rank.last_plan);
    rank.last_plan = plan.number;
    rank.unfinished_plans.push_back(plan.process_set);
    CHECK(std::binary_search(plan.members.begin(), plan.members.end(), rank.number));
    std::string& text = rank.plans[plan.number];
    text = std::to_string(plan.process_set) + (plan.untouched ? "u" : "t") + check::show(plan.members) +
           std::to_string(plan.contributors);
    for (const PlannedTensor& tensor : plan.tensors) {
      text += " " + tensor.signature->name;
      text += check::show(tensor.signature->shape) + check::show(tensor.rows);
      CHECK(tensor.signature->kind == plan.kind);
      if (tensor.ticket == 0) continue;
      ++plans_.contributions[plan.number][tensor.signature->name];
      check_tensor(rank, plan, tensor);
      answer(rank, tensor.ticket, {End::planned, plan.number, 0});
    }
    plans_.contributors[plan.number] = plan.contributors;
  }

  void check_tensor(const Rank& rank, const Plan& plan, const PlannedTensor& tensor) {
    const auto found = rank.in_flight.find(tensor.ticket);
    if (found == rank.in_flight.end()) return;
    const Line& line = program_.lines[found->second];
    Signature own = line.signatures[static_cast<size_t>(rank.number)];
    CHECK_EQUAL(tensor.signature->name, own.name);
    const size_t position = static_cast<size_t>(
        std::lower_bound(plan.members.begin(), plan.members.end(), rank.number) - plan.members.begin());
    if (is_ragged(own.kind)) {
      const auto rows = rows_at(*tensor.signature, tensor.rows, plan.members.size(), position), wanted = rows_of(own);
      CHECK_EQUAL(std::vector(rows.begin(), rows.end()), std::vector(wanted.begin(), wanted.end()));
    } else {
      CHECK_EQUAL(tensor.signature->shape, own.shape);
    }
    if (plan.untouched) CHECK(line.absent[static_cast<size_t>(rank.number)]);
  }

  void hear_set_change(Rank& rank, const ProcessSetChange& change) {
    const auto found = rank.in_flight.find(change.ticket);
    if (found != rank.in_flight.end() && !change.members.empty()) rank.sets[found->second + 1] = change.process_set;
    CHECK((rank.negotiator.members(change.process_set) == nullptr) == change.members.empty());
    if (change.ticket) answer(rank, change.ticket, {End::changed, 0, change.process_set});
  }

  void answer(Rank& rank, Ticket ticket, Answer answer) {
    const auto found = rank.in_flight.find(ticket);
    if (found == rank.in_flight.end()) return check::fail(__FILE__, __LINE__, "an answer without a request");
    const size_t place = found->second;
    const Line& line = program_.lines[place];
    if (line.what == Line::What::add_set && answer.end == End::refused) rank.sets[place + 1] = refused_set;
    rank.answers[place] = answer;
    rank.in_flight.erase(found);
  }

  void finish_plan(Rank& rank) {
    if (rank.unfinished_plans.empty()) return;
    rank.negotiator.plan_finished(rank.unfinished_plans.front());
    rank.unfinished_plans.pop_front();
  }

  void check_end() {
    Bytes bytes;
    CHECK(!coordinator_.decide(now_, bytes));
    CHECK_EQUAL(coordinator_.next_deadline(), never);
    for (const auto& rank : ranks_) CHECK(rank->has_left || rank->negotiator.report_due() == never);
    for (size_t place = 0; place < program_.lines.size(); ++place) check_answers(place);
    plans_.check(ranks_);
  }

  // Checks that all participants received the same answer, and that it is the required one.
  void check_answers(size_t place) {
    const Line& line = program_.lines[place];
    const Answer* first = nullptr;
    for (const auto& rank : ranks_) {
      const auto found = rank->answers.find(place);
      if (found == rank->answers.end()) continue;
      const Answer& answer = found->second;
      if (!first) first = &answer;
      CHECK_EQUAL(answer.end, first->end);
      CHECK_EQUAL(answer.plan, first->plan);
      // A group's late members may receive the name of the rank that left, instead of the group's first cause.
      if (!mix_.goodbyes) CHECK_EQUAL(answer.value, first->value);
    }
    if (!first || mix_.goodbyes || first->value == SRT_INVALID_ARGUMENT) return;
    if (line.must_fail) CHECK_EQUAL(first->end, End::refused);
    if (!line.must_fail && first->end == End::refused) check::fail(__FILE__, __LINE__, "refused without a reason");
  }

  static constexpr int32_t refused_set = -1;

  Mix mix_;
  Program program_;
  ReportRule rule_;
  Coordinator coordinator_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  int32_t leaver_ = nobody;
  size_t leaves_at_ = 0;
  bool is_tree_ = false;
  std::string decided_;
  size_t steps_ = 0;
  size_t stalls_ = 0;
  Nanoseconds now_ = seconds(1);
  uint64_t decisions_ = 0;
  std::map<CacheId, std::string> cached_;
  std::set<CacheId> ids_seen_;
  PlanBook plans_;
};

}  // namespace sirtaki
