// An all-reduce of all ranks in virtual time: the core's own operations between hosts, whose frames travel over the
// virtual network, the core's own schedule, and steps in the memory of each host (host_memory.h).
//
// A rank looks for news before each step. On a processor of its own it has them at once. Ranks that share a few
// processors look in turns, as real ones do (core/context/engine/polling.h: more ranks than cores yield between two
// looks, and sleep only if a peer takes longer than its steps so far): each look takes its time, even if there are no
// news.
#pragma once

#include <deque>
#include <optional>

#include "host_memory.h"

namespace virtual_network {

class AllreduceWorld {
 public:
  explicit AllreduceWorld(const Numbers& numbers)
      : numbers_(numbers), costs_(numbers), hosts_(hosts_of(numbers)), names_(rank_names(numbers)),
        network_(costs_.model, numbers.small("ranks")),
        hosts_steps_(static_cast<size_t>(costs_.model.host_of(numbers.small("ranks") - 1) + 1)),
        queues_(static_cast<size_t>(numbers.get("processors"))), memory_(static_cast<size_t>(numbers.get("bytes"))) {
    const bool is_hierarchical =
        choose_for(*make_allreduce(numbers, 0, memory_.data()), hosts_) == Algorithm::hierarchical;
    for (int32_t rank = 0; rank < numbers.small("ranks"); ++rank) {
      ranks_.push_back(std::make_unique<Rank>(numbers.small("ranks")));
      for (int32_t lower = 0; lower < rank; ++lower)
        if (!is_hierarchical || (rank - lower) % numbers.small("each") == 0) connect(lower, rank);
    }
    for (int32_t rank = 0; rank < numbers.small("ranks"); ++rank) begin(rank, is_hierarchical);
  }

  AllreduceResult run() {
    for (int32_t rank = 0; rank < numbers_.small("ranks"); ++rank) {
      if (is_shared()) queue_of(rank).push_back(rank);
      else run_turn(rank);
    }
    for (std::deque<int32_t>& queue : queues_) take_next(queue);
    Network::Turn turn;
    while (waiting_ > 0) {
      must(network_.next(turn, seconds(3600)), "the all-reduce came to a halt");
      take(turn);
    }
    return result_;
  }

 private:
  struct Rank {
    explicit Rank(int32_t size) : links(size) {}

    std::vector<Message> outbox;
    Links links;
    std::unique_ptr<HostBackend> inside;
    std::unique_ptr<LinkBackend> between;
    std::unique_ptr<HierarchicalBackend> hierarchy;
    std::unique_ptr<Operation> operation;
    Traffic arrived;  // since its last turn
    std::optional<RankTime> time;
    Nanoseconds runs_until = 0;
    bool has_moved = false;  // in its last turn
  };

  Rank& at(int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  void connect(int32_t one, int32_t other) {
    auto here = std::make_unique<Pipe>(one, at(one).outbox), there = std::make_unique<Pipe>(other, at(other).outbox);
    Pipe::join(*here, *there);
    at(one).links.add_socket(other, std::move(here));
    at(other).links.add_socket(one, std::move(there));
  }

  void begin(int32_t number, bool is_hierarchical) {
    Rank& rank = at(number);
    const LinkSetting setting{rank.links, baseline_kernels(), names_, chunk_bytes_of_links};
    const int32_t host = costs_.model.host_of(number);
    rank.time.emplace(now_, 0, [this, host] { wake_host(host); });
    rank.inside = std::make_unique<HostBackend>(hosts_steps_[static_cast<size_t>(host)], costs_, *rank.time);
    rank.between = std::make_unique<LinkBackend>(setting, hosts_, "auto");
    rank.hierarchy =
        std::make_unique<HierarchicalBackend>(HierarchyParts{{rank.inside.get()}, rank.between.get(), hosts_, "auto"});
    const TransferPtr transfer = make_allreduce(numbers_, number, memory_.data());
    Backend& backend = is_on_one_host(numbers_) ? static_cast<Backend&>(*rank.inside)
                       : is_hierarchical        ? static_cast<Backend&>(*rank.hierarchy)
                                                : *rank.between;
    rank.operation = backend.start(transfer);
    ++waiting_;
  }

  // Lets the ranks of a host look at once that have processors of their own. Others look when they have their turn.
  void wake_host(int32_t host) {
    if (is_shared()) return;
    const int32_t each = numbers_.small("each"), end = std::min((host + 1) * each, numbers_.small("ranks"));
    for (int32_t rank = host * each; rank < end; ++rank) network_.wake(rank, now_);
  }

  // Returns the queue of the shared processor on which a rank stays: processors that are never idle exchange none.
  std::deque<int32_t>& queue_of(int32_t rank) { return queues_[static_cast<size_t>(rank) % queues_.size()]; }

  bool is_shared() const { return !queues_.empty(); }

  void take(const Network::Turn& turn) {
    Rank& rank = at(turn.rank);
    now_ = turn.at;
    add(rank.arrived, turn.arrived);
    if (!is_shared()) {
      if (rank.runs_until <= now_) run_turn(turn.rank);
    } else if (rank.runs_until == now_) {
      end_turn(turn.rank);
    }
  }

  // Gives the processor of a rank whose turn has ended to the same rank, if it has moved, or to the next one.
  void end_turn(int32_t number) {
    Rank& rank = at(number);
    rank.runs_until = never;
    std::deque<int32_t>& queue = queue_of(number);
    if (rank.operation && rank.has_moved) queue.push_front(number);
    else if (rank.operation) queue.push_back(number);
    take_next(queue);
  }

  void take_next(std::deque<int32_t>& queue) {
    if (queue.empty()) return;
    const int32_t next = queue.front();
    queue.pop_front();
    run_turn(next);
  }

  void run_turn(int32_t number) {
    Rank& rank = at(number);
    if (!rank.operation) return;
    rank.time->worked = 0;
    Nanoseconds took = costs_.processing(rank.arrived);
    rank.arrived = {};
    Progress progress = Progress::moved;
    while (progress == Progress::moved) must(rank.operation->advance(now_, progress).is_ok(), "the all-reduce failed");
    took += rank.time->worked + send_all(rank, number, took);
    rank.has_moved = took > 0;
    if (is_shared()) took += costs_.look;
    rank.runs_until = now_ + took;
    if (is_shared() || rank.has_moved) network_.wake(number, rank.runs_until);
    if (progress != Progress::done) return;
    rank.operation.reset();
    --waiting_;
    result_.took = std::max(result_.took, rank.runs_until);
  }

  // Sends what a rank has written after `took` of its turn. Returns the time that it takes.
  Nanoseconds send_all(Rank& rank, int32_t number, Nanoseconds took) {
    const Nanoseconds before = took;
    for (Message& message : rank.outbox) {
      Traffic sent;
      sent.add(message.bytes);
      if (costs_.model.host_of(number) == 0 && costs_.model.host_of(message.to->owner()) != 0)
        add(result_.of_host, sent);
      took += costs_.processing(sent);
      network_.send(number, std::move(message), now_ + took);
    }
    rank.outbox.clear();
    return took - before;
  }

  static void add(Traffic& sum, const Traffic& part) {
    sum.frames += part.frames;
    sum.bytes += part.bytes;
  }

  const Numbers& numbers_;
  AllreduceCosts costs_;
  std::vector<int32_t> hosts_;
  std::vector<std::string> names_;
  Network network_;
  std::vector<HostSteps> hosts_steps_;
  std::vector<std::deque<int32_t>> queues_;  // by shared processor: ranks that wait for a turn
  Bytes memory_;  // the tensors of all ranks: zeros, whose sum is zero
  std::vector<std::unique_ptr<Rank>> ranks_;
  Nanoseconds now_ = 0;
  size_t waiting_ = 0;
  AllreduceResult result_;
};

}  // namespace virtual_network
