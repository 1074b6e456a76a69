// Ranks of several hosts negotiate over links that move when a test says so: what crosses what on its way.
#include "context/negotiation.h"

#include <algorithm>

#include "check.h"

using namespace sirtaki;

namespace {

using Knobs = std::vector<std::pair<std::string, std::string>>;

// One end of a connection within this process.
class Pipe final : public BytePipe {
 public:
  Pipe(std::shared_ptr<Bytes> out, std::shared_ptr<Bytes> in) : out_(std::move(out)), in_(std::move(in)) {}

  ptrdiff_t write(std::span<const uint8_t> bytes, bool) override {
    out_->insert(out_->end(), bytes.begin(), bytes.end());
    return static_cast<ptrdiff_t>(bytes.size());
  }
  ptrdiff_t read(std::span<uint8_t> bytes) override {
    const auto count = static_cast<ptrdiff_t>(std::min(bytes.size(), in_->size()));
    std::copy_n(in_->begin(), count, bytes.begin());
    in_->erase(in_->begin(), in_->begin() + count);
    return count;
  }

 private:
  std::shared_ptr<Bytes> out_, in_;
};

// By rank, which host it is on.
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
    (*this)[rank].member().submit({std::move(signature), 1}, now);
    (*this)[rank].member().flush();
  }

  Outcome pass(int32_t rank) {
    News news;
    CHECK_EQUAL(std::string((*this)[rank].pass(now, news).text()), "");
    return std::move(news.outcome);
  }

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

// Its answer would be a report after its goodbye, of which the coordinator could make nothing.
TEST(a_leader_that_is_asked_where_it_is_while_it_leaves_does_not_answer) {
  Ranks ranks({0, 1, 1}, {{"stall_report", "0.1"}});
  for (int32_t rank : {0, 2}) ranks.submit(rank, "x");
  ranks.pass(2);
  ranks.pass(1);
  ranks.now += milliseconds(10);  // it is not held for longer
  ranks.pass(1);
  ranks.pass(0);
  ranks.now += milliseconds(100);
  ranks.pass(0);
  ranks[1].leave(ranks.now);
  CHECK(ranks.pass(1).is_asked);
  ranks[1].member().answer({1, true, {}, {}});  // as its engine does
  ranks.pass(1);
  for (int32_t rank : {0, 1, 2}) {
    const Outcome told = ranks.pass(rank);
    if (rank == 1) continue;
    REQUIRE(told.refusals.size() == 1);
    CHECK_EQUAL(told.refusals[0].status.code(), SRT_PEER_FINISHED);
  }
}

CHECK_MAIN()
