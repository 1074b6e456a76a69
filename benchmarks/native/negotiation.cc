// The cost of negotiation among many ranks: the core's own negotiation on every rank, in virtual time, without sockets
// and threads, through leaders or directly with rank 0.
//
//   negotiation ranks=4096 each=8 fan_out=16 tensors=400 latency=30 gigabits=10 steps=5
//
// Every rank submits its tensors at the same moment, and the latency is the time until the last rank has the Decision.
// A message travels as virtual_network.h describes. A rank's work takes as long as the core's code took here, on a
// processor of its own. fan_out=0: no leaders. Prints one JSON object: the first step (requests in full), and medians
// of the following steps (numbers of the response cache); bytes and frames are those of one step, times are in
// microseconds.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "context/negotiation.h"
#include "drivers.h"
#include "virtual_network.h"

namespace {

using namespace virtual_network;

constexpr Nanoseconds between_steps = milliseconds(100);
constexpr Nanoseconds longest_step = seconds(60);

// Returns the time that passes between two consecutive reads of the clock.
Nanoseconds measure_clock() {
  Nanoseconds least = never;
  for (int i = 0; i < 1'000; ++i) {
    const Nanoseconds begun = processor_time();
    least = std::min(least, processor_time() - begun);
  }
  return least;
}

struct Setting {
  int32_t ranks = 64, each = 8, fan_out = 16, tensors = 400, latency = 30, gigabits = 10, steps = 5;

  void set(const std::string& argument) {
    const std::map<std::string, int32_t*> known{{"ranks", &ranks},     {"each", &each},       {"fan_out", &fan_out},
                                                {"tensors", &tensors}, {"latency", &latency}, {"gigabits", &gigabits},
                                                {"steps", &steps}};
    const size_t equals = argument.find('=');
    const auto found = known.find(argument.substr(0, equals));
    must(equals != std::string::npos && found != known.end(), "each argument is NAME=NUMBER");
    *found->second = std::atoi(argument.c_str() + equals + 1);
    const bool may_be_none = found->second == &fan_out || found->second == &latency;
    must(*found->second >= (may_be_none ? 0 : 1), "a number is too small");
  }

  // Returns the tree. Without leaders each rank counts as alone on its host, and all are children of rank 0.
  ControlTree tree() const {
    std::vector<int32_t> hosts;
    for (int32_t rank = 0; rank < ranks; ++rank) hosts.push_back(fan_out ? rank / each : rank);
    return ControlTree(hosts, fan_out ? fan_out : ranks);
  }
};

// The cost of one step. Rank 0's processor time, frames and bytes are counted separately; the bytes of all ranks are
// the bytes sent.
struct Cost {
  int64_t latency = 0, processor = 0;  // ns
  Traffic received, sent, of_all;
};

struct Rank {
  explicit Rank(int32_t size) : links(size) {}

  std::vector<Message> outbox;
  Links links;
  std::unique_ptr<Negotiation> negotiation;
  Nanoseconds is_free = 0;  // when its processor is free
  Nanoseconds wakes = never;
  Nanoseconds busy = 0;  // in this step
  int32_t missing = 0;  // tensors that are not planned yet
  std::string heard;  // the plans received in this step, as text
  std::vector<int32_t> plans;  // the process sets of the plans that have not ended
};

class World {
 public:
  explicit World(const Setting& setting)
      : setting_(setting), clock_(measure_clock()),
        network_({setting.each, microseconds(setting.latency), microseconds(2), static_cast<double>(setting.gigabits)},
                 setting.ranks) {
    const ControlTree tree = setting.tree();
    for (int32_t rank = 0; rank < setting.ranks; ++rank) {
      names_.push_back(format("rank %d (pid %d on host%d)", rank, 1000 + rank, rank / setting.each));
      ranks_.push_back(std::make_unique<Rank>(setting.ranks));
      if (rank > 0) connect(tree.parent(rank), rank);
    }
    for (int32_t rank = 0; rank < setting.ranks; ++rank)
      at(rank).negotiation =
          std::make_unique<Negotiation>(NegotiationParts{rank, names_, tree, at(rank).links, nullptr}, Config());
    for (int32_t i = 0; i < setting.tensors; ++i) {
      Signature signature;
      signature.name = format("allreduce.model.layers.%d.weight", i);
      signature.shape = {64, 64};
      tensors_.push_back(std::make_shared<const Signature>(std::move(signature)));
    }
  }

  Cost step() {
    const Nanoseconds start = now_ + between_steps;
    Network::Turn turn;
    while (network_.next(turn, start)) take(turn);  // timers that have nothing to report any more
    cost_ = {};
    for (int32_t rank = 0; rank < setting_.ranks; ++rank) submit(rank, start);
    for (waiting_ = setting_.ranks; waiting_ > 0 || !network_.is_idle();) {
      must(network_.next(turn, start + longest_step), "the negotiation came to a halt");
      take(turn);
    }
    for (const auto& rank : ranks_) must(rank->heard == at(0).heard, "ranks heard of different plans");
    cost_.processor = at(0).busy;
    cost_.latency = last_heard_ - start;
    return cost_;
  }

 private:
  Rank& at(int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  void connect(int32_t parent, int32_t child) {
    auto above = std::make_unique<Pipe>(parent, at(parent).outbox),
         below = std::make_unique<Pipe>(child, at(child).outbox);
    Pipe::join(*above, *below);
    at(parent).links.add_socket(child, std::move(above));
    at(child).links.add_socket(parent, std::move(below));
  }

  // Submits all gradients of a training step, after finishing the plans of the last step.
  void submit(int32_t number, Nanoseconds start) {
    Rank& rank = at(number);
    Negotiator& negotiator = rank.negotiation->negotiator();
    for (int32_t process_set : rank.plans) negotiator.plan_finished(process_set);
    rank.plans.clear();
    rank.heard.clear();
    rank.missing = setting_.tensors;
    rank.busy = 0;
    Ticket ticket = 0;
    for (const SignaturePtr& tensor : tensors_) negotiator.submit({tensor, ++ticket}, start);
    negotiator.flush();
    wake(number, start);
  }

  void wake(int32_t number, Nanoseconds moment) {
    Rank& rank = at(number);
    if (moment >= rank.wakes) return;
    rank.wakes = moment;
    network_.wake(number, moment);
  }

  // Runs one pass, unless the processor is still busy with the last one.
  void take(const Network::Turn& turn) {
    const int32_t number = turn.rank;
    Rank& rank = at(number);
    now_ = turn.at;
    if (rank.wakes <= now_) rank.wakes = never;
    if (rank.is_free > now_) return wake(number, rank.is_free);
    NegotiationEvents events;
    const Nanoseconds begun = processor_time();
    const Status status = rank.negotiation->advance(now_, events);
    const Nanoseconds ended = processor_time();
    must(status.is_ok(), status.text());
    const Nanoseconds looks = send_out(number, begun);
    const Nanoseconds took = std::max<Nanoseconds>(ended - begun - clock_ - looks, 0);
    rank.busy += took;
    rank.is_free = now_ + took;
    for (const Plan& plan : events.outcome.plans) hear(rank, plan);
    const Nanoseconds due = rank.negotiation->next_due();
    if (due != never) wake(number, std::max(due, rank.is_free + 1));
  }

  // Sends what the rank has written in a pass that began at `begun`, by its processor's time. Returns the time that
  // reading the clock took.
  Nanoseconds send_out(int32_t number, Nanoseconds begun) {
    Rank& rank = at(number);
    Nanoseconds looks = 0;
    for (Message& message : rank.outbox) {
      cost_.of_all.add(message.bytes);
      if (number == coordinator_rank) cost_.sent.add(message.bytes);
      if (message.to->owner() == coordinator_rank) cost_.received.add(message.bytes);
      looks += clock_;
      const Nanoseconds leaves = now_ + std::max<Nanoseconds>(message.begun - begun - looks, 0);
      network_.send(number, std::move(message), leaves);
    }
    rank.outbox.clear();
    return looks;
  }

  void hear(Rank& rank, const Plan& plan) {
    rank.plans.push_back(plan.process_set);
    rank.heard += format("%llu:", static_cast<unsigned long long>(plan.number));
    for (const PlannedTensor& tensor : plan.tensors) rank.heard += tensor.signature->name + " ";
    rank.missing -= static_cast<int32_t>(plan.tensors.size());
    if (rank.missing > 0) return;
    --waiting_;
    last_heard_ = std::max(last_heard_, rank.is_free);
  }

  Setting setting_;
  Nanoseconds clock_;
  Network network_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<SignaturePtr> tensors_;
  Nanoseconds now_ = seconds(1), last_heard_ = 0;
  int32_t waiting_ = 0;
  Cost cost_;
};

double median_of(const std::vector<Cost>& steps, int64_t (*of)(const Cost&)) {
  std::vector<double> values;
  for (const Cost& step : steps) values.push_back(static_cast<double>(of(step)));
  return median(values);
}

void print(const char* name, const std::vector<Cost>& steps) {
  const auto of = [&](int64_t (*value)(const Cost&)) { return median_of(steps, value); };
  std::printf("\"%s\": {\"latency\": %.1f, \"processor\": %.1f", name,
              of([](const Cost& c) { return c.latency; }) / 1e3, of([](const Cost& c) { return c.processor; }) / 1e3);
  std::printf(", \"frames_in\": %.0f, \"bytes_in\": %.0f", of([](const Cost& c) { return c.received.frames; }),
              of([](const Cost& c) { return c.received.bytes; }));
  std::printf(", \"frames_out\": %.0f, \"bytes_out\": %.0f", of([](const Cost& c) { return c.sent.frames; }),
              of([](const Cost& c) { return c.sent.bytes; }));
  std::printf(", \"frames_of_all\": %.0f, \"bytes_of_all\": %.0f}", of([](const Cost& c) { return c.of_all.frames; }),
              of([](const Cost& c) { return c.of_all.bytes; }));
}

}  // namespace

int main(int argument_count, char** arguments) {
  Setting setting;
  for (int i = 1; i < argument_count; ++i) setting.set(arguments[i]);
  World world(setting);
  const Cost first = world.step();
  std::vector<Cost> steady;
  for (int32_t i = 0; i < setting.steps; ++i) steady.push_back(world.step());
  std::printf("{");
  print("first", {first});
  std::printf(", ");
  print("steady", steady);
  std::printf("}\n");
}
