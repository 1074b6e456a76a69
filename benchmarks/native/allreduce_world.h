// An all-reduce of all ranks in virtual time: the core's own operations between hosts, whose frames travel over the
// virtual network, and the core's own schedule. Inside a host, phases take modelled times, once all members are there.
#pragma once

#include "allreduce_costs.h"

namespace virtual_network {

// The phases of one host: each ends a modelled time after the last of its members has begun it.
struct HostPhases {
  struct Phase {
    size_t begun = 0;
    Nanoseconds ends_at = never;
  };
  std::map<int32_t, Phase> phases;  // by the number of the phase
};

// The backend of one rank for the transfers within its host.
class HostBackend final : public Backend {
 public:
  HostBackend(HostPhases& host, const AllreduceCosts& costs, const Nanoseconds& now,
              std::function<void(const Transfer&, Nanoseconds)> wake)
      : host_(host), costs_(costs), now_(now), wake_(std::move(wake)) {}

  BackendName name(const Transfer&) const override { return BackendName::shared_memory; }
  bool serves(const Transfer&) const override { return true; }
  unsigned needs(const Transfer&) const override { return needs_nothing; }
  std::unique_ptr<Operation> start(TransferPtr transfer) override {
    HostPhases::Phase& phase = host_.phases[transfer->phase];
    if (++phase.begun == transfer->members.size()) {
      phase.ends_at = now_ + costs_.through_memory(*transfer);
      wake_(*transfer, phase.ends_at);
    }
    return std::make_unique<Waiting>(phase);
  }

 private:
  struct Waiting final : Operation {
    explicit Waiting(const HostPhases::Phase& awaited) : phase(awaited) {}
    Status advance(Nanoseconds now, Progress& progress) override {
      progress = now >= phase.ends_at ? Progress::done : Progress::blocked;
      return Status::ok();
    }
    const HostPhases::Phase& phase;
  };

  HostPhases& host_;
  const AllreduceCosts& costs_;
  const Nanoseconds& now_;
  std::function<void(const Transfer&, Nanoseconds)> wake_;
};

class AllreduceWorld {
 public:
  explicit AllreduceWorld(const Numbers& numbers)
      : numbers_(numbers), costs_(numbers), hosts_(hosts_of(numbers)), names_(rank_names(numbers)),
        network_(costs_.model, numbers.small("ranks")),
        processors_(numbers.small("ranks"), numbers.small("processors")),
        phases_(static_cast<size_t>(costs_.model.host_of(numbers.small("ranks") - 1) + 1)),
        memory_(static_cast<size_t>(numbers.get("bytes"))) {
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
    for (size_t rank = 0; rank < ranks_.size(); ++rank) network_.wake(static_cast<int32_t>(rank), 0);
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
    Nanoseconds wakes = never;
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
    const auto wake_all = [this](const Transfer& transfer, Nanoseconds moment) {
      for (int32_t member : transfer.members) network_.wake(member, moment);  // besides earlier wake-ups
    };
    rank.inside = std::make_unique<HostBackend>(phases_[static_cast<size_t>(costs_.model.host_of(number))], costs_,
                                                now_, wake_all);
    rank.between = std::make_unique<LinkBackend>(setting, hosts_, "auto");
    rank.hierarchy =
        std::make_unique<HierarchicalBackend>(HierarchyParts{{rank.inside.get()}, rank.between.get(), hosts_, "auto"});
    const TransferPtr transfer = make_allreduce(numbers_, number, memory_.data());
    rank.operation = is_hierarchical ? rank.hierarchy->start(transfer) : rank.between->start(transfer);
    ++waiting_;
  }

  void wake(int32_t number, Nanoseconds moment) {
    Rank& rank = at(number);
    if (moment >= rank.wakes) return;
    rank.wakes = moment;
    network_.wake(number, moment);
  }

  void take(const Network::Turn& turn) {
    Rank& rank = at(turn.rank);
    now_ = turn.at;
    add(rank.arrived, turn.arrived);
    if (rank.wakes <= now_) rank.wakes = never;
    if (const Nanoseconds free = processors_.is_free(turn.rank); free > now_) return wake(turn.rank, free);
    Nanoseconds took = costs_.processing(rank.arrived);
    rank.arrived = {};
    Progress progress = Progress::moved;
    while (rank.operation && progress == Progress::moved)
      must(rank.operation->advance(now_, progress).is_ok(), "the all-reduce failed");
    for (Message& message : rank.outbox) {
      Traffic sent;
      sent.add(message.bytes);
      if (costs_.model.host_of(turn.rank) == 0 && costs_.model.host_of(message.to->owner()) != 0)
        add(result_.of_host, sent);
      took += costs_.processing(sent);
      network_.send(turn.rank, std::move(message), now_ + took);
    }
    rank.outbox.clear();
    processors_.occupy(turn.rank, now_ + took);
    if (progress != Progress::done || !rank.operation) return;
    rank.operation.reset();
    --waiting_;
    result_.took = std::max(result_.took, now_ + took);
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
  Processors processors_;
  std::vector<HostPhases> phases_;  // by host
  Bytes memory_;  // the tensors of all ranks: zeros, whose sum is zero
  std::vector<std::unique_ptr<Rank>> ranks_;
  Nanoseconds now_ = 0;
  size_t waiting_ = 0;
  AllreduceResult result_;
};

}  // namespace virtual_network
