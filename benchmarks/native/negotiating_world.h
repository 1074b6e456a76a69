// A world of ranks that negotiate in virtual time: the core's own negotiation on every rank, without sockets and
// threads, through leaders or directly with rank 0.
//
// A rank's work takes as long as the core's code took here, on a processor of its own. What the code around the
// negotiation costs is given: for each message to another host, and for each time that a rank is woken by messages.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "context/plans/negotiation.h"
#include "drivers.h"
#include "virtual_network.h"

namespace virtual_network {

// Returns the time that passes between two consecutive reads of the clock.
inline Nanoseconds measure_clock() {
  Nanoseconds least = never;
  for (int i = 0; i < 1'000; ++i) {
    const Nanoseconds begun = processor_time();
    least = std::min(least, processor_time() - begun);
  }
  return least;
}

// Returns the numbers that describe a world, with their default values; times are in microseconds, costs in
// nanoseconds.
inline Numbers world_numbers() {
  return {{{"ranks", 64},
           {"each", 8},
           {"fan_out", 16},
           {"tensors", 400},
           {"latency", 30},
           {"gigabits", 10},
           {"rack", 0},
           {"oversubscription", 1},
           {"steps", 5},
           {"pause", 100'000},
           {"message", 0},
           {"wake", 0},
           {"late", 0},
           {"late_by", 0},
           {"barriers", 0}},
          {"ranks", "each", "tensors", "gigabits", "oversubscription", "steps", "pause"}};
}

inline Model network_model(const Numbers& numbers) {
  return {numbers.small("each"), microseconds(numbers.get("latency")),
          microseconds(2),       static_cast<double>(numbers.get("gigabits")),
          numbers.small("rack"), static_cast<double>(numbers.get("oversubscription"))};
}

// Returns the tree. Without leaders each rank counts as alone on its host, and all are children of rank 0.
inline ControlTree control_tree(const Numbers& numbers) {
  const int32_t ranks = numbers.small("ranks"), each = numbers.small("each"), fan_out = numbers.small("fan_out");
  std::vector<int32_t> hosts;
  for (int32_t rank = 0; rank < ranks; ++rank) hosts.push_back(fan_out ? rank / each : rank);
  return {hosts, fan_out ? fan_out : ranks};
}

inline std::vector<std::string> rank_names(const Numbers& numbers) {
  std::vector<std::string> names;
  for (int32_t rank = 0; rank < numbers.small("ranks"); ++rank)
    names.push_back(format("rank %d (pid %d on host%d)", rank, 1000 + rank, rank / numbers.small("each")));
  return names;
}

// The cost of one step. Rank 0's processor time, frames and bytes are counted separately; the bytes of all ranks are
// the bytes sent.
struct Cost {
  int64_t latency = 0, processor = 0;  // ns
  Traffic received, sent, of_all;
};

class NegotiatingWorld {
 public:
  explicit NegotiatingWorld(const Numbers& numbers)
      : tensor_count_(numbers.small("tensors")), pause_(microseconds(numbers.get("pause"))),
        message_(numbers.get("message")), wake_(numbers.get("wake")), clock_(measure_clock()),
        names_(rank_names(numbers)), model_(network_model(numbers)), network_(model_, numbers.small("ranks")) {
    const ControlTree tree = control_tree(numbers);
    for (int32_t rank = 0; rank < tree.size(); ++rank) {
      ranks_.push_back(std::make_unique<Rank>(most_of(tree, rank) + 1));
      if (rank > 0) connect(tree.parent(rank), rank);
    }
    for (int32_t rank = 0; rank < tree.size(); ++rank)
      at(rank).negotiation =
          std::make_unique<Negotiation>(NegotiationParts{rank, names_, tree, at(rank).links, nullptr}, Config());
    for (int32_t i = 0; i < tensor_count_; ++i) tensors_.push_back(make_tensor(i, numbers.get("barriers") != 0));
    delay_last_ranks(numbers);
  }

  // Runs a step: all ranks submit, and receive all plans. Its latency begins with the last submission.
  Cost step() {
    const Nanoseconds start = now_ + pause_;
    Network::Turn turn;
    while (network_.next(turn, start)) take(turn);  // timers that have nothing to report any more
    cost_ = {};
    Nanoseconds last = start;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      begin_step(*ranks_[rank]);
      const Nanoseconds submits_at = start + ranks_[rank]->delay;
      last = std::max(last, submits_at);
      wake(static_cast<int32_t>(rank), submits_at);
    }
    for (waiting_ = ranks_.size(); waiting_ > 0 || !network_.is_idle();) {
      must(network_.next(turn, last + longest_step), "the negotiation came to a halt");
      take(turn, start);
    }
    for (const auto& rank : ranks_) must(rank->heard == at(0).heard, "ranks heard of different plans");
    cost_.processor = at(0).busy;
    cost_.latency = last_heard_ - last;
    return cost_;
  }

  // Returns the lateness of ranks, as rank 0 has been informed of it.
  const std::map<int32_t, Lateness>& lateness() const { return lateness_; }

 private:
  static constexpr Nanoseconds longest_step = seconds(600);

  struct Rank {
    explicit Rank(int32_t size) : links(size) {}

    std::vector<Message> outbox;
    Links links;
    std::unique_ptr<Negotiation> negotiation;
    Nanoseconds wakes = never;
    Nanoseconds free_at = 0;  // when it has ended its work
    Nanoseconds busy = 0;  // in this step
    Nanoseconds delay = 0;  // of its submissions
    bool is_to_submit = false;
    int32_t missing = 0;  // tensors that are not planned yet
    size_t heard = 0;  // the plans received in this step, as a hash of their text
    std::vector<int32_t> plans;  // the process sets of the plans that have not ended
  };

  // Returns the highest rank to which a rank has a link, or itself.
  static int32_t most_of(const ControlTree& tree, int32_t rank) {
    return std::max(tree.children(rank).empty() ? rank : tree.children(rank).back(), rank);
  }

  static SignaturePtr make_tensor(int32_t number, bool is_barrier) {
    Signature signature;
    signature.name = format("allreduce.model.layers.%d.weight", number);
    if (is_barrier) signature.kind = Kind::barrier;
    else signature.shape = {64, 64};
    return std::make_shared<const Signature>(std::move(signature));
  }

  Rank& at(int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  // Delays the last rank of each of the last hosts, the last one most.
  void delay_last_ranks(const Numbers& numbers) {
    const int32_t size = numbers.small("ranks"), each = numbers.small("each"), late = numbers.small("late");
    for (int32_t i = 0, rank = size - 1; i < late && rank > 0; ++i, rank -= each)
      at(rank).delay = microseconds(numbers.get("late_by")) * (late - i) / late;
  }

  void connect(int32_t parent, int32_t child) {
    auto above = std::make_unique<Pipe>(parent, at(parent).outbox),
         below = std::make_unique<Pipe>(child, at(child).outbox);
    Pipe::join(*above, *below);
    at(parent).links.add_socket(child, std::move(above));
    at(child).links.add_socket(parent, std::move(below));
  }

  // Finishes the plans of the last step.
  void begin_step(Rank& rank) {
    for (int32_t process_set : rank.plans) rank.negotiation->negotiator().plan_finished(process_set);
    rank.plans.clear();
    rank.heard = 0;
    rank.missing = tensor_count_;
    rank.busy = 0;
    rank.is_to_submit = true;
  }

  void wake(int32_t number, Nanoseconds moment) {
    Rank& rank = at(number);
    if (moment >= rank.wakes) return;
    rank.wakes = moment;
    network_.wake(number, moment);
  }

  // Runs one pass, unless the processor is still busy. A rank submits in its first pass after `start` and its delay.
  void take(const Network::Turn& turn, Nanoseconds start = never) {
    const int32_t number = turn.rank;
    Rank& rank = at(number);
    now_ = turn.at;
    if (rank.wakes <= now_) rank.wakes = never;
    if (rank.free_at > now_) return wake(number, rank.free_at);
    Nanoseconds took = wake_;
    if (rank.is_to_submit && start != never && now_ >= start + rank.delay) submit(rank);
    NegotiationEvents events;
    const Nanoseconds begun = processor_time();
    const Status status = rank.negotiation->advance(now_ + took, events);
    const Nanoseconds ended = processor_time();
    must(status.is_ok(), status.text());
    const Nanoseconds looks = send_out(number, begun, took);
    took += std::max<Nanoseconds>(ended - begun - clock_ - looks, 0);
    rank.busy += took;
    rank.free_at = now_ + took;
    for (const Plan& plan : events.outcome.plans) hear(rank, plan, now_ + took);
    if (number == coordinator_rank)
      for (const RankLateness& late : events.outcome.lateness) lateness_[late.rank] = late.lateness;
    const Nanoseconds due = rank.negotiation->next_due();
    if (due != never) wake(number, std::max(due, now_ + took + 1));
    if (rank.is_to_submit && start != never) wake(number, std::max(start + rank.delay, now_ + took + 1));
  }

  void submit(Rank& rank) {
    rank.is_to_submit = false;
    Negotiator& negotiator = rank.negotiation->negotiator();
    Ticket ticket = 0;
    for (const SignaturePtr& tensor : tensors_) negotiator.submit({tensor, ++ticket}, now_);
    negotiator.flush();
  }

  // Sends what the rank has written in a pass that began at `begun`, by its processor's time, `after` its work of other
  // kinds, which grows by the cost of the messages. Returns the time that reading the clock took.
  Nanoseconds send_out(int32_t number, Nanoseconds begun, Nanoseconds& after) {
    Rank& rank = at(number);
    Nanoseconds looks = 0;
    for (Message& message : rank.outbox) {
      cost_.of_all.add(message.bytes);
      if (number == coordinator_rank) cost_.sent.add(message.bytes);
      if (message.to->owner() == coordinator_rank) cost_.received.add(message.bytes);
      looks += clock_;
      if (model_.host_of(number) != model_.host_of(message.to->owner())) after += message_;
      const Nanoseconds leaves = now_ + after + std::max<Nanoseconds>(message.begun - begun - looks, 0);
      network_.send(number, std::move(message), leaves);
    }
    rank.outbox.clear();
    return looks;
  }

  void hear(Rank& rank, const Plan& plan, Nanoseconds moment) {
    const auto mix = [&](size_t value) { rank.heard = (rank.heard ^ value) * 0x100000001b3 + 1; };
    rank.plans.push_back(plan.process_set);
    mix(plan.number);
    for (const PlannedTensor& tensor : plan.tensors) mix(std::hash<std::string>()(tensor.signature->name));
    rank.missing -= std::max(static_cast<int32_t>(plan.tensors.size()), 1);
    if (rank.missing > 0) return;
    --waiting_;
    last_heard_ = std::max(last_heard_, moment);
  }

  const int32_t tensor_count_;
  const Nanoseconds pause_, message_, wake_, clock_;
  std::vector<std::string> names_;
  const Model model_;
  Network network_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<SignaturePtr> tensors_;
  Nanoseconds now_ = seconds(1), last_heard_ = 0;
  size_t waiting_ = 0;
  std::map<int32_t, Lateness> lateness_;
  Cost cost_;
};

}  // namespace virtual_network
