// The loss of a leader, in virtual time: the leader's process ends, or all processes of its host do.
//
//   lost_rank ranks=512 each=8 host=0 latency=30 gigabits=10 message=0 wake=0
//
// Every rank has the links with which it starts, and one to each rank of its host in place of the shared memory, and
// runs the core's own Negotiation, which notices that a link has ended, sends aborts, and receives them. The core's
// PeerMonitor needs descriptors of the operating system, so its rule is repeated here: a rank that notices the end
// waits 200 ms for the reason, which the lost rank may have sent to others, unless it shares the lost rank's host; then
// it aborts. A rank that receives an abort passes it on over its links. Prints one JSON object: the ranks that aborted
// by themselves, the times after the loss at which the first and the last survivor knew of it, and the frames and bytes
// that survivors sent to each other.
#include "control/relay/first_links.h"
#include "negotiating_world.h"

namespace {

using namespace virtual_network;

constexpr Nanoseconds longest_wait_for_reason = milliseconds(200);  // as in core/context/failure/peer_monitor.cc

class LinkedWorld {
 public:
  explicit LinkedWorld(const Numbers& numbers)
      : model_(network_model(numbers)), message_(numbers.get("message")), wake_(numbers.get("wake")),
        names_(rank_names(numbers)), network_(model_, numbers.small("ranks")) {
    const ControlTree tree = control_tree(numbers);
    std::vector<int32_t> hosts;
    for (int32_t rank = 0; rank < tree.size(); ++rank) {
      hosts.push_back(model_.host_of(rank));
      ranks_.push_back(std::make_unique<Rank>(tree.size()));
    }
    for (int32_t rank = 0; rank < tree.size(); ++rank)
      link(rank, first_links(rank, hosts, tree, numbers.get("fan_out")));
    for (int32_t rank = 0; rank < tree.size(); ++rank)
      at(rank).negotiation =
          std::make_unique<Negotiation>(NegotiationParts{rank, names_, tree, at(rank).links, nullptr}, Config());
  }

  // Ends the leader of the second host, with its whole host if wanted, and runs until all others know of it.
  void lose_leader(bool with_host) {
    const int32_t leader = model_.ranks_a_host;
    const int32_t end = with_host ? 2 * leader : leader + 1;
    for (int32_t rank = leader; rank < end; ++rank) end_rank(rank);
    waiting_ = ranks_.size() - static_cast<size_t>(end - leader);
    Network::Turn turn;
    while (waiting_ > 0) {
      must(network_.next(turn, seconds(600)), "not all ranks have noticed the loss");
      take(turn);
    }
    std::printf("{\"announced\": %d, \"first\": %.1f, \"last\": %.1f, \"frames\": %lld, \"bytes\": %lld}\n", announced_,
                static_cast<double>(first_) / 1e3, static_cast<double>(last_) / 1e3,
                static_cast<long long>(sent_.frames), static_cast<long long>(sent_.bytes));
  }

 private:
  struct Rank {
    explicit Rank(int32_t size) : links(size) {}

    std::vector<Message> outbox;
    std::vector<Pipe*> pipes;
    Links links;
    std::unique_ptr<Negotiation> negotiation;
    int32_t suspect = -1;
    Nanoseconds suspect_until = never;
    Nanoseconds free_at = 0;  // when it has ended its work
    bool is_lost = false, is_over = false;  // over: it is lost, or knows of the loss
  };

  Rank& at(int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  // Connects a rank to its higher peers, and to the higher ranks of its host.
  void link(int32_t rank, std::vector<int32_t> peers) {
    const int32_t next_host = (model_.host_of(rank) + 1) * model_.ranks_a_host;
    for (int32_t local = rank + 1; local < std::min(next_host, static_cast<int32_t>(ranks_.size())); ++local)
      if (!std::ranges::count(peers, local)) peers.push_back(local);
    for (int32_t peer : peers)
      if (peer > rank) connect(rank, peer);
  }

  void connect(int32_t one, int32_t other) {
    auto here = std::make_unique<Pipe>(one, at(one).outbox), there = std::make_unique<Pipe>(other, at(other).outbox);
    Pipe::join(*here, *there);
    at(one).pipes.push_back(here.get());
    at(other).pipes.push_back(there.get());
    at(one).links.add_socket(other, std::move(here));
    at(other).links.add_socket(one, std::move(there));
  }

  void end_rank(int32_t number) {
    at(number).is_lost = at(number).is_over = true;
    for (Pipe* pipe : at(number).pipes) pipe->end();
    send_out(number, 0);
  }

  void take(const Network::Turn& turn) {
    Rank& rank = at(turn.rank);
    if (rank.is_over) return;
    if (rank.free_at > turn.at) return network_.wake(turn.rank, rank.free_at);
    NegotiationEvents events;
    const Status status = rank.negotiation->advance(turn.at, events);
    must(status.is_ok(), status.text());
    for (const LostPeer& lost : events.lost) suspect(turn, lost.rank);
    Nanoseconds took = wake_;
    if (events.abort) took = pass_on(*events.abort, turn, took);
    else if (turn.at >= rank.suspect_until) took = announce(turn, took);
    rank.free_at = turn.at + took;
  }

  void suspect(const Network::Turn& turn, int32_t lost) {
    Rank& rank = at(turn.rank);
    if (rank.suspect >= 0) return;
    const bool is_local = model_.host_of(lost) == model_.host_of(turn.rank);
    rank.suspect = lost;
    rank.suspect_until = turn.at + (is_local ? 1 : longest_wait_for_reason);
    network_.wake(turn.rank, rank.suspect_until);
  }

  // Passes on a received abort. Returns how long the rank has worked.
  Nanoseconds pass_on(const AbortNotice& notice, const Network::Turn& turn, Nanoseconds took) {
    know(at(turn.rank), turn.at + took);
    at(turn.rank).negotiation->pass_on(notice, turn.at);
    return send_out(turn.rank, turn.at + took) - turn.at;
  }

  // Sends an abort of its own. Returns how long the rank has worked.
  Nanoseconds announce(const Network::Turn& turn, Nanoseconds took) {
    Rank& rank = at(turn.rank);
    constexpr char how[] =
        "its process ended, or the connection to it broke, without a goodbye. Its own output says why";
    const std::string text = format("%s was lost: %s", names_[static_cast<size_t>(rank.suspect)].c_str(), how);
    know(rank, turn.at + took);
    ++announced_;
    rank.negotiation->send_abort({{SRT_PEER_LOST, text}, rank.suspect}, turn.at);
    return send_out(turn.rank, turn.at + took) - turn.at;
  }

  void know(Rank& rank, Nanoseconds moment) {
    rank.is_over = true;
    first_ = std::min(first_, moment);
    last_ = std::max(last_, moment);
    --waiting_;
  }

  // Sends what the rank has written, from a moment on. Returns when the last message has left.
  Nanoseconds send_out(int32_t number, Nanoseconds moment) {
    for (Message& message : at(number).outbox) {
      const bool is_end = message.bytes.empty();
      if (!is_end) moment += message_;
      if (!is_end && !at(message.to->owner()).is_lost) sent_.add(message.bytes);
      network_.send(number, std::move(message), moment);
    }
    at(number).outbox.clear();
    return moment;
  }

  const Model model_;
  const Nanoseconds message_, wake_;
  std::vector<std::string> names_;
  Network network_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  size_t waiting_ = 0;
  int32_t announced_ = 0;
  Nanoseconds first_ = never, last_ = 0;
  Traffic sent_;
};

}  // namespace

int main(int argument_count, char** arguments) {
  Numbers numbers = world_numbers();
  numbers.add("host", 0);
  numbers.parse(argument_count, arguments);
  must(numbers.get("ranks") > 2 * numbers.get("each"), "the loss needs three hosts or more");
  LinkedWorld(numbers).lose_leader(numbers.get("host") != 0);
}
