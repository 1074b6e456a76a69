// The all-reduce of one host's ranks by the core's own schedule: the hierarchical operation is the core's, and its
// phases take modelled times. All hosts are alike, so that the phases of one host are those of each other one.
#pragma once

#include "memory_steps.h"

namespace virtual_network {

// A backend whose operations do nothing for a modelled time.
class ModelledBackend final : public Backend {
 public:
  using Duration = std::function<Nanoseconds(const Transfer&)>;

  ModelledBackend(const Nanoseconds& now, Duration duration) : now_(now), duration_(std::move(duration)) {}

  BackendName name(const Transfer&) const override { return BackendName::none; }
  bool serves(const Transfer&) const override { return true; }
  unsigned needs(const Transfer&) const override { return needs_nothing; }
  std::unique_ptr<Operation> start(TransferPtr transfer) override {
    ends_at_ = now_ + duration_(*transfer);
    return std::make_unique<Pause>(ends_at_);
  }

  // Returns when the operation that has begun last ends.
  Nanoseconds ends_at() const { return ends_at_; }

 private:
  struct Pause final : Operation {
    explicit Pause(Nanoseconds until) : ends_at(until) {}
    Status advance(Nanoseconds now, Progress& progress) override {
      progress = now >= ends_at ? Progress::done : Progress::blocked;
      return Status::ok();
    }
    Nanoseconds ends_at;
  };

  const Nanoseconds& now_;
  Duration duration_;
  Nanoseconds ends_at_ = 0;
};

class AllreduceModel {
 public:
  explicit AllreduceModel(const Numbers& numbers) : numbers_(numbers), costs_(numbers), hosts_(hosts_of(numbers)) {}

  AllreduceResult run() {
    AllreduceResult result;
    const int32_t local = std::min(numbers_.small("each"), numbers_.small("ranks"));
    for (int32_t rank = 0; rank < local; ++rank) {
      result.took = std::max(result.took, time_of(rank));
      result.of_host.frames += sent_.frames;
      result.of_host.bytes += sent_.bytes;
    }
    return result;
  }

 private:
  Nanoseconds time_of(int32_t rank) {
    now_ = 0;
    sent_ = {};
    ModelledBackend inside(now_, [this](const Transfer& transfer) { return through_memory(transfer); });
    ModelledBackend between(now_, [this](const Transfer& transfer) { return through_links(transfer); });
    const TransferPtr transfer = make_allreduce(numbers_, rank, &nothing_);
    if (is_on_one_host(numbers_)) return through_memory(*transfer);
    if (choose_for(*transfer, hosts_) != Algorithm::hierarchical) return through_links(*transfer);
    HierarchicalBackend hierarchy({{&inside}, &between, hosts_, "auto"});
    const std::unique_ptr<Operation> operation = hierarchy.start(transfer);
    for (;;) {
      Progress progress = Progress::blocked;
      must(operation->advance(now_, progress).is_ok(), "the all-reduce failed");
      if (progress == Progress::done) return now_;
      if (progress != Progress::blocked) continue;
      const Nanoseconds one = inside.ends_at(), other = between.ends_at();
      now_ = std::min(one > now_ ? one : never, other > now_ ? other : never);
      must(now_ != never, "the all-reduce came to a halt");
    }
  }

  // Returns how many ranks share a processor.
  int64_t ranks_a_processor() const {
    const int64_t processors = numbers_.get("processors");
    return processors ? std::max(numbers_.get("ranks") / processors, int64_t{1}) : 1;
  }

  // Returns the time of a transfer in which no rank waits for others.
  Nanoseconds through_memory(const Transfer& transfer) const {
    return MemorySteps(transfer, costs_).sum() * ranks_a_processor();
  }

  // Returns the time of a transfer between hosts: in each of two exchanges, slices and results, the slowest of the
  // cable, the rack's uplink, and a rank's processor, then the latency.
  Nanoseconds through_links(const Transfer& transfer) {
    const int32_t own = transfer.members[transfer.own];
    const auto is_any = [](int32_t) { return true; };
    const auto is_in_other_rack = [&](int32_t rank) { return costs_.model.rack_of(rank) != costs_.model.rack_of(own); };
    const Traffic all = frames_between(transfer, hosts_, is_any),
                  across = frames_between(transfer, hosts_, is_in_other_rack);
    sent_.frames += all.frames;
    sent_.bytes += all.bytes;
    const int64_t carriers = std::min(numbers_.get("each"), numbers_.get("ranks"));
    const Nanoseconds cable = carrying(static_cast<size_t>(all.bytes * carriers), costs_.model.gigabits);
    const Nanoseconds uplink = costs_.model.hosts_a_rack
                                   ? carrying(static_cast<size_t>(across.bytes * carriers * costs_.model.hosts_a_rack),
                                              costs_.model.uplink_gigabits())
                                   : 0;
    const Nanoseconds processor = 2 * costs_.processing(all) * ranks_a_processor();  // it receives as much as it sends
    return std::max({cable, uplink, processor}) + (transfer.members.size() > 2 ? 2 : 1) * costs_.model.latency;
  }

  const Numbers& numbers_;
  AllreduceCosts costs_;
  std::vector<int32_t> hosts_;
  uint8_t nothing_ = 0;  // stands for the tensors, which nobody reads
  Nanoseconds now_ = 0;
  Traffic sent_;
};

}  // namespace virtual_network
