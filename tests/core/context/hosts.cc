// Worlds of several hosts: a failure on one host ends all others' operations with the same text; operations within one
// host proceed beside those that cross hosts.
#include <atomic>
#include <numeric>

#include "faulty_wire.h"
#include "world.h"

using namespace world;

namespace {

const std::vector<std::pair<std::string, std::string>> quiet{{"log_descriptor", "-1"}, {"chunk_bytes", "4096"}};

// Runs sums until one fails, and returns its status.
Status sum_until_it_fails(Context& context, int64_t count) {
  FloatSum sum("endless", count);
  for (;;) {
    const Status status = end_of(context, sum.request);
    if (!status.is_ok()) return status;
  }
}

// Gives each rank of each placement its turn to be the one that fails.
void with_each_culprit(const std::function<void(World&, int size, int culprit)>& body) {
  for (const std::vector<int>& hosts : placements) {
    const int size = static_cast<int>(hosts.size());
    for (int culprit = 0; culprit < size; ++culprit) {
      World ranks(size, on_hosts(hosts, quiet));
      body(ranks, size, culprit);
    }
  }
}

}  // namespace

TEST(a_large_ragged_allgather_is_cut_into_pieces) {
  for (const std::vector<int>& hosts : placements) {
    const int size = static_cast<int>(hosts.size());
    World ranks(size, on_hosts(hosts, {}));
    ranks.run([&](int rank, Context& context) {
      constexpr int64_t each = 500'003;  // rank 0 has no rows
      const int64_t count = rank * each;
      std::vector<int32_t> own(static_cast<size_t>(count)), expected;
      std::iota(own.begin(), own.end(), rank);
      for (int from = 0; from < size; ++from)
        for (int64_t i = 0; i < from * each; ++i) expected.push_back(static_cast<int32_t>(from + i));
      srt_request gather = request(SRT_ALLGATHER, "g", &count, 1, DType::int32);
      gather.input = reinterpret_cast<uintptr_t>(own.data());
      run_well(context, gather, [&](Ticket handle) { CHECK(output_of<int32_t>(context, handle) == expected); });
    });
  }
}

TEST(an_abort_crosses_hosts_with_its_words) {
  with_each_culprit([](World& ranks, int size, int aborter) {
    std::atomic<int> through{0};
    ranks.run([&](int rank, Context& context) {
      FloatSum sum("warm", 20'000);
      run_well(context, sum.request);
      for (++through; through < size;) std::this_thread::yield();
      if (rank == aborter) context.abort("RuntimeError: loss is NaN");
      else CHECK_EQUAL(sum_until_it_fails(context, sum.count).code(), SRT_ABORTED);
      CHECK(std::string(context.death_text()).find(format("rank %d (pid %d on ", aborter, 100 + aborter)) == 0);
      CHECK(contains(context.death_text(), " gave up: RuntimeError: loss is NaN"));
    });
  });
}

// Most of the ranks have no link to the one that gives up.
TEST(an_abort_is_passed_on_to_those_without_a_link) {
  auto knobs = quiet;
  knobs.emplace_back("control_fan_out", "1");
  World ranks(8, on_hosts({0, 1, 2, 3, 4, 5, 6, 7}, knobs));
  for (int rank = 0; rank < 8; ++rank) CHECK_EQUAL(ranks[rank].first_links().size(), size_t{2});
  ranks.run([&](int rank, Context& context) {
    if (rank == 5) context.abort("RuntimeError: loss is NaN");
    else CHECK_EQUAL(sum_until_it_fails(context, 100).code(), SRT_ABORTED);
    CHECK(std::string(context.death_text()).find("rank 5 (pid 105 on here) gave up: ") == 0);
  });
}

TEST(a_connection_between_hosts_that_breaks_ends_every_rank) {
  for (size_t after : {0, 100, 3'000, 100'000}) {
    Wire wire(Fault::cut, after);
    Options options = on_hosts({0, 0, 1, 1}, quiet);
    options.connect = wire.between(0, 2);
    World ranks(4, std::move(options));
    ranks.run([&](int, Context& context) {
      const Status status = sum_until_it_fails(context, 20'000);
      CHECK_EQUAL(status.code(), SRT_PEER_LOST);
      CHECK(contains(status, " was lost: "));
    });
  }
}

TEST(a_rank_that_has_left_another_host_is_named) {
  with_each_culprit([](World& ranks, int size, int leaver) {
    std::atomic<int> done{0};
    ranks.run([&](int rank, Context& context) {
      FloatSum sum("x", 5'000);
      run_well(context, sum.request);
      if (rank == leaver) return;
      const Status status = end_of(context, sum.request);
      CHECK_EQUAL(status.code(), SRT_PEER_FINISHED);
      CHECK(contains(status, format("rank %d (pid %d on ", leaver, 100 + leaver)));
      for (++done; done < size - 1;) std::this_thread::yield();
    });
  });
}

TEST(what_stays_on_a_host_goes_on_beside_what_crosses_hosts) {
  World ranks(4, on_hosts({0, 0, 1, 1}, quiet));
  ranks.run([](int rank, Context& context) {
    const int32_t first = add_set(context, {0, 1}), second = add_set(context, {2, 3}),
                  across = add_set(context, {1, 2});
    const int32_t own = rank < 2 ? first : second;
    const bool crosses = rank == 1 || rank == 2;
    for (int step = 0; step < static_cast<int>(check::seeds(15)); ++step) {
      const int64_t large = 100'000, small = 300;
      std::vector<int32_t> world(static_cast<size_t>(large), rank + step),
          local(static_cast<size_t>(small), rank + step), pair(static_cast<size_t>(small), rank + step);
      std::vector<srt_request> requests{in_place(SRT_ALLREDUCE, "world", world, large, DType::int32),
                                        in_place(SRT_ALLREDUCE, "local", local, small, DType::int32)};
      requests[1].process_set = own;
      if (crosses) {
        requests.push_back(in_place(SRT_ALLREDUCE, "pair", pair, small, DType::int32));
        requests[2].process_set = across;
      }
      run_batch_well(context, requests);
      CHECK_EQUAL(std::count(world.begin(), world.end(), 6 + 4 * step), large);
      CHECK_EQUAL(std::count(local.begin(), local.end(), (rank < 2 ? 1 : 5) + 2 * step), small);
      if (crosses) CHECK_EQUAL(std::count(pair.begin(), pair.end(), 3 + 2 * step), small);
    }
  });
}

// A pipe whose silence a test sets.
class SilentPipe final : public BytePipe {
 public:
  SilentPipe(const Nanoseconds& silence, int& probes) : silence_(silence), probes_(probes) {}
  ptrdiff_t write(std::span<const uint8_t> bytes, bool) override { return static_cast<ptrdiff_t>(bytes.size()); }
  ptrdiff_t read(std::span<uint8_t>) override { return 0; }
  Nanoseconds silence() const override { return silence_; }
  void probe() const override { ++probes_; }

 private:
  const Nanoseconds& silence_;
  int& probes_;
};

TEST(a_machine_that_stays_silent_is_named_and_one_that_answers_late_is_not) {
  Nanoseconds silence = 0;
  int probes = 0;
  Links links(2);
  links.add_socket(1, std::make_unique<SilentPipe>(silence, probes));
  const RankNames names{"rank 0 (pid 1 on here)", "rank 1 (pid 2 on there)"};
  Heartbeat heartbeat(links, names, seconds(15));
  Nanoseconds now = seconds(100);
  const auto look = [&](Nanoseconds silent) {
    silence = silent;
    return heartbeat.check(now += seconds(1));
  };
  CHECK(!look(seconds(7)));
  CHECK_EQUAL(probes, 0);
  CHECK(!look(seconds(8)));
  CHECK(!look(seconds(14)));
  CHECK_EQUAL(probes, 2);  // in time to be answered
  for (int i = 0; i < 5; ++i) {  // it answers one probe per minute, and is checked at that moment
    CHECK(!look(seconds(60)));
    CHECK(!look(0));
  }
  CHECK(!look(seconds(15)));
  CHECK(!heartbeat.check(now + milliseconds(500)));  // too soon to count as a second check
  const auto lost = look(seconds(16));
  REQUIRE(lost.has_value());
  CHECK_EQUAL(lost->origin, 1);
  CHECK_EQUAL(lost->status.code(), SRT_PEER_LOST);
  CHECK(std::string(lost->status.text())
            .find("rank 1 (pid 2 on there) was lost: its machine has not answered for 16 s") == 0);
  probes = 0;
  Heartbeat patient(links, names, seconds(600));
  for (int i = 0; i < 299; ++i) CHECK(!(silence = seconds(300 + i), patient.check(now += seconds(1))));
  CHECK(probes >= 14 && probes <= 15);
  silence = seconds(16);
  Heartbeat never(links, names, 0);
  for (int i = 0; i < 3; ++i) CHECK(!never.check(now += seconds(1)));
}
