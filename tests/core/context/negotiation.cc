// Ranks of several hosts negotiate over links that move when a test says so: messages that cross on their way.
#include "context/plans/negotiation.h"

#include <algorithm>

#include "check.h"
#include "pipe.h"

using namespace sirtaki;
using world::Pipe;

namespace {

using Knobs = std::vector<std::pair<std::string, std::string>>;

// The negotiating ranks; `hosts` gives the host of each rank.
class Ranks {
 public:
  explicit Ranks(const std::vector<int32_t>& hosts, const Knobs& knobs = {}) {
    const ControlTree tree(hosts, 16);
    Config config;
    for (const auto& [name, value] : knobs) CHECK(config.set(name, value).is_ok());
    for (int32_t rank = 0; rank < tree.size(); ++rank) {
      names_.push_back(format("rank %d", rank));
      links_.push_back(std::make_unique<Links>(tree.size()));
      if (rank > 0) connect(tree.parent(rank), rank);
    }
    for (int32_t rank = 0; rank < tree.size(); ++rank)
      ranks_.push_back(std::make_unique<Negotiation>(
          NegotiationParts{rank, names_, tree, *links_[static_cast<size_t>(rank)], nullptr}, config));
  }

  Negotiation& operator[](int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  void submit(int32_t rank, const char* name) {
    auto signature = std::make_shared<Signature>();
    signature->name = name;
    (*this)[rank].negotiator().submit({std::move(signature), 1}, now);
    (*this)[rank].negotiator().flush();
  }

  Outcome advance(int32_t rank) {
    NegotiationEvents news;
    expect_ok((*this)[rank].advance(now, news));
    return std::move(news.outcome);
  }

  // Returns the link on which a rank sends to another one.
  Link& link(int32_t from, int32_t to) { return *links_[static_cast<size_t>(from)]->control(to); }

  Nanoseconds now = seconds(100);

 private:
  void connect(int32_t above, int32_t below) {
    auto up = std::make_shared<Bytes>(), down = std::make_shared<Bytes>();
    links_[static_cast<size_t>(above)]->add_socket(below, std::make_unique<Pipe>(down, up));
    links_[static_cast<size_t>(below)]->add_socket(above, std::make_unique<Pipe>(up, down));
  }

  RankNames names_;
  std::vector<std::unique_ptr<Links>> links_;
  std::vector<std::unique_ptr<Negotiation>> ranks_;
};

}  // namespace

// An answer would be a report after the leader's goodbye, which the coordinator could not handle.
TEST(a_leader_that_is_asked_where_it_is_while_it_leaves_does_not_answer) {
  Ranks ranks({0, 1, 1}, {{"stall_report", "0.1"}});
  for (int32_t rank : {0, 2}) ranks.submit(rank, "x");
  ranks.advance(2);
  ranks.advance(1);
  ranks.now += milliseconds(10);  // its request is not held for longer
  ranks.advance(1);
  ranks.advance(0);
  ranks.now += milliseconds(100);
  ranks.advance(0);
  ranks[1].leave(ranks.now);
  CHECK(ranks.advance(1).is_asked);
  ranks[1].negotiator().answer({1, true, {}, {}});  // as its engine does
  ranks.advance(1);
  for (int32_t rank : {0, 1, 2}) {
    const Outcome told = ranks.advance(rank);
    if (rank == 1) continue;
    REQUIRE(told.refusals.size() == 1);
    CHECK_EQUAL(told.refusals[0].status.code(), SRT_PEER_FINISHED);
  }
}

// The number of the rank that has left is used for a look-up.
TEST(a_rank_that_has_left_above_has_to_exist) {
  for (const int32_t rank : {-1, 0, 2, 3, 1'000}) {
    Ranks ranks({0, 0, 0});
    Bytes body;
    Writer(body).put(rank);
    ranks.link(0, 1).send({.kind = FrameKind::cut_off}, body);
    ranks.link(0, 1).flush();
    NegotiationEvents news;
    const Status status = ranks[1].advance(ranks.now, news);
    if (rank >= 0 && rank < 3) {
      expect_ok(status);
      CHECK_EQUAL(news.finished_above, rank);
    } else {
      CHECK_EQUAL(status.code(), SRT_PROTOCOL);
      CHECK_EQUAL(status.culprit(), 0);
    }
  }
}

TEST(only_those_above_decide_or_say_that_somebody_has_left) {
  Bytes body;
  Writer(body).put<int32_t>(1);
  for (const FrameKind kind : {FrameKind::cut_off, FrameKind::decision}) {
    Ranks ranks({0, 0, 0});
    ranks.link(1, 0).send({.kind = kind}, body);
    ranks.link(1, 0).flush();
    NegotiationEvents news;
    const Status status = ranks[0].advance(ranks.now, news);
    CHECK_EQUAL(status.code(), SRT_PROTOCOL);
    CHECK_EQUAL(std::string(status.text()),
                format("rank 1 sent a frame of kind %d that it may not send", static_cast<int>(kind)));
    CHECK_EQUAL(status.culprit(), 1);
  }
}

// An abort that ends the world on one rank ends it on all, so its reason must be one that does.
TEST(an_abort_has_to_have_a_reason_that_ends_the_world) {
  for (const srt_status code :
       std::vector<srt_status>{SRT_PEER_LOST, SRT_OK, SRT_IN_PROGRESS, SRT_MISMATCH, -1, 1'000}) {
    Ranks ranks({0, 0});
    Bytes body;
    Writer writer(body);
    writer.put(static_cast<int32_t>(code));
    writer.put<int32_t>(1);
    writer.put<uint64_t>(0);
    writer.put_text("why");
    ranks.link(1, 0).send({.kind = FrameKind::abort}, body);
    ranks.link(1, 0).flush();
    NegotiationEvents news;
    const Status status = ranks[0].advance(ranks.now, news);
    CHECK_EQUAL(status.code(), code == SRT_PEER_LOST ? SRT_OK : SRT_PROTOCOL);
    CHECK_EQUAL(news.abort.has_value(), code == SRT_PEER_LOST);
  }
}

// A goodbye in shared memory overtakes what is still on its way over the socket.
TEST(a_goodbye_counts_on_the_link_of_the_data) {
  for (const bool comes_late : {false, true}) {
    const auto ring = std::make_shared<Bytes>(), socket = std::make_shared<Bytes>(), back = std::make_shared<Bytes>();
    Links links(2);
    links.add_ring(1, std::make_unique<Pipe>(back, ring));
    if (comes_late) links.obtain(1);
    else links.add_socket(1, std::make_unique<Pipe>(back, socket));
    const RankNames names{"rank 0", "rank 1"};
    Negotiation negotiation({0, names, ControlTree({0, 0}, 16), links, nullptr}, Config());
    for (const auto& [way, has_finished] : {std::pair(ring, false), std::pair(socket, true)}) {
      Link peer(std::make_unique<Pipe>(way, back));
      peer.send({.kind = FrameKind::goodbye}, {});
      peer.flush();
      NegotiationEvents news;
      CHECK(negotiation.advance(seconds(1), news).is_ok());
      CHECK_EQUAL(negotiation.has_finished(1), has_finished);
      if (comes_late && !has_finished) links.add_socket(1, std::make_unique<Pipe>(back, socket));
    }
  }
}
