// An all-reduce among many ranks on a fat tree, in virtual time, by the algorithm that the core chooses.
//
//   allreduce ranks=1024 each=8 bytes=67108864 gigabits=10 latency=30 rack=16 oversubscription=2
//
// The hierarchical operation is the core's, and its phases take modelled times. All hosts are alike, so that the phases
// of one host are those of each other one. Prints one JSON object: the algorithm, the time in microseconds, and the
// frames and bytes that leave one host.
#include <numeric>

#include "data/hierarchical/hierarchical.h"
#include "data/links/algorithm.h"
#include "data/links/link_operation.h"
#include "negotiating_world.h"

namespace {

using namespace virtual_network;

constexpr int64_t chunk_bytes_of_links = 512 << 10;  // the core's default

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::direct: return "direct";
    case Algorithm::ring: return "ring";
    case Algorithm::recursive_doubling: return "recursive doubling";
    case Algorithm::hierarchical: return "hierarchical";
  }
  return "";
}

// Returns the numbers that describe an all-reduce, with their default values. memory: megabytes per second that a host
// copies through shared memory, or reads to add them up; message: nanoseconds of a processor for each frame sent or
// received.
Numbers allreduce_numbers() {
  Numbers numbers = world_numbers();
  numbers.add("bytes", 64 << 20);
  numbers.add("memory", 20'000);
  return numbers;
}

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
  explicit AllreduceModel(const Numbers& numbers) : numbers_(numbers), model_(network_model(numbers)) {
    must(numbers.get("memory") > 0, "memory is too small");
    for (int32_t rank = 0; rank < numbers.small("ranks"); ++rank) hosts_.push_back(model_.host_of(rank));
  }

  // Prints the results.
  void run() {
    Nanoseconds took = 0;
    for (int32_t rank = 0; rank < local(); ++rank) took = std::max(took, time_of(rank));
    const char* algorithm = is_on_one_host() ? "shared memory" : name_of(choose(*make(0)));
    std::printf("{\"algorithm\": \"%s\", \"microseconds\": %.1f, \"frames\": %lld, \"bytes\": %lld}\n", algorithm,
                static_cast<double>(took) / 1e3, static_cast<long long>(sent_.frames),
                static_cast<long long>(sent_.bytes));
  }

 private:
  int32_t local() const { return std::min(numbers_.small("each"), numbers_.small("ranks")); }
  bool is_on_one_host() const { return numbers_.get("ranks") <= numbers_.get("each"); }

  // Returns an all-reduce in place of one rank, among all ranks.
  TransferPtr make(int32_t rank) {
    auto transfer = std::make_shared<Transfer>();
    transfer->plan = 1;
    transfer->own = static_cast<size_t>(rank);
    transfer->members.resize(hosts_.size());
    std::iota(transfer->members.begin(), transfer->members.end(), 0);
    transfer->buffer.add(&nothing_, &nothing_, numbers_.get("bytes"));
    return transfer;
  }

  Algorithm choose(const Transfer& transfer) const {
    return choose_algorithm("auto", count_members(transfer.members, hosts_), transfer.buffer.bytes());
  }

  // Returns the time until a rank has the sum, and adds the rank's frames to those that leave the host.
  Nanoseconds time_of(int32_t rank) {
    now_ = 0;
    ModelledBackend inside(now_, [this](const Transfer& transfer) { return through_memory(transfer); });
    ModelledBackend between(now_, [this](const Transfer& transfer) { return through_links(transfer); });
    const TransferPtr transfer = make(rank);
    if (is_on_one_host()) return through_memory(*transfer);
    if (choose(*transfer) != Algorithm::hierarchical) return through_links(*transfer);
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

  // Returns the time of a transfer within a host in which no rank waits for others, by the bytes that the core's
  // operations copy, and read to add them up (core/data/memory/memory_reductions.cc, memory_movers.cc).
  Nanoseconds through_memory(const Transfer& transfer) const {
    const auto members = static_cast<int64_t>(transfer.members.size());
    const auto all = [](const std::vector<ScatterList>& parts) {
      return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                             [](int64_t sum, const ScatterList& part) { return sum + part.bytes(); });
    };
    int64_t moved = 0;
    if (transfer.kind == Kind::reducescatter) {  // packs the others' shares, and adds up its own of all
      moved = all(transfer.outgoing) + (members - 1) * transfer.outgoing[transfer.own].bytes();
    } else if (transfer.kind == Kind::allgather) {  // packs its own part, and copies those of the others
      moved = all(transfer.incoming);
    } else if (transfer.kind == Kind::allreduce) {
      // Packs its own tensor, and adds up all, if there are two members, or few bytes. Otherwise it also copies the
      // slices that others have reduced.
      constexpr int64_t few_bytes = 64 << 10;
      const int64_t bytes = transfer.buffer.bytes();
      moved = members == 2 || members * bytes <= few_bytes ? (members + 1) * bytes : 3 * bytes;
    } else {
      must(false, "a transfer has no model here");
    }
    const double speed = static_cast<double>(numbers_.get("memory")) / local();  // MB/s, of a processor
    return static_cast<Nanoseconds>(static_cast<double>(moved) * 1e3 / speed);
  }

  // Returns the time of a transfer between hosts: in each of two exchanges, slices and results, the slowest of the
  // cable, the rack's uplink, and a rank's processor, then the latency.
  Nanoseconds through_links(const Transfer& transfer) {
    const int32_t own = transfer.members[transfer.own];
    const auto is_any = [](int32_t) { return true; };
    const auto is_in_other_rack = [&](int32_t rank) { return model_.rack_of(rank) != model_.rack_of(own); };
    const Traffic all = frames_between(transfer, is_any), across = frames_between(transfer, is_in_other_rack);
    sent_.frames += all.frames;
    sent_.bytes += all.bytes;
    const Nanoseconds cable = carrying(static_cast<size_t>(all.bytes * local()), model_.gigabits);
    const auto of_rack = static_cast<size_t>(across.bytes * local() * model_.hosts_a_rack);
    const Nanoseconds uplink = model_.hosts_a_rack ? carrying(of_rack, model_.uplink_gigabits()) : 0;
    const Nanoseconds processor = 2 * numbers_.get("message") * all.frames;  // it receives as many as it sends
    return std::max({cable, uplink, processor}) + (transfer.members.size() > 2 ? 2 : 1) * model_.latency;
  }

  // Returns the frames that a member of a transfer between hosts sends, by the algorithm that links choose: pairwise
  // exchange in rounds of a chunk per member, or recursive doubling between two. Counts those to `is_wanted` members.
  template <typename IsWanted>
  Traffic frames_between(const Transfer& transfer, IsWanted&& is_wanted) const {
    Traffic sent;
    const size_t members = transfer.members.size();
    const int64_t total = transfer.buffer.bytes();
    const bool is_direct = choose(transfer) == Algorithm::direct;
    must(is_direct || members == 2, "an algorithm has no schedule here");
    const int64_t round = chunk_bytes_of_links * (is_direct ? static_cast<int64_t>(members) : 1);
    for (int64_t begin = 0; begin < total; begin += round) {
      const int64_t bytes = std::min(round, total - begin);
      const int64_t own = is_direct ? slice_of(bytes, members, transfer.own).bytes : 0;
      for (size_t member = 0; member < members; ++member) {
        if (member == transfer.own || !is_wanted(transfer.members[member])) continue;
        sent.frames += is_direct ? 2 : 1;
        sent.bytes +=
            is_direct ? frame_bytes(slice_of(bytes, members, member).bytes) + frame_bytes(own) : frame_bytes(bytes);
      }
    }
    return sent;
  }

  // Returns the bytes of a frame on the wire.
  static int64_t frame_bytes(int64_t body) {
    return static_cast<int64_t>(sizeof(FrameHeader) + padded(static_cast<size_t>(body)));
  }

  const Numbers& numbers_;
  Model model_;
  std::vector<int32_t> hosts_;
  uint8_t nothing_ = 0;  // stands for the tensors, which nobody reads
  Nanoseconds now_ = 0;
  Traffic sent_;  // by all ranks of a host
};

}  // namespace

int main(int argument_count, char** arguments) {
  Numbers numbers = allreduce_numbers();
  numbers.parse(argument_count, arguments);
  AllreduceModel(numbers).run();
}
