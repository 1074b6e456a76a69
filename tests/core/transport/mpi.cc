// Worlds of several hosts between which MPI moves the data.
#include <atomic>
#include <numeric>

#include "fake_mpi.h"

using namespace world;

namespace {

// The results of one operation of each kind, as bytes, on one rank.
std::vector<std::vector<uint8_t>> results_of(Context& context, int rank, int size, int64_t count) {
  std::vector<std::vector<uint8_t>> results;
  const int64_t rows = count * size;
  std::vector<float> data, output;
  const auto run = [&](int32_t kind, const char* name, const std::function<void(srt_request&)>& change = {}) {
    data = delicate(rank, rows);
    output.assign(static_cast<size_t>(rows), 0);
    srt_request made = from_to(request(kind, name, &rows, 1), data, output);
    if (kind == SRT_ALLGATHER || kind == SRT_ALLTOALL) made.output = 0;
    if (change) change(made);
    run_well(context, made, [&](Ticket handle) { results.push_back(output_of<uint8_t>(context, handle)); });
  };
  run(SRT_ALLREDUCE, "sum");
  run(SRT_ALLREDUCE, "adasum", [](srt_request& made) { made.reduce_op = SRT_ADASUM; });
  run(SRT_BROADCAST, "broadcast", [&](srt_request& made) { made.root = size - 1; });
  run(SRT_ALLGATHER, "gather");
  run(SRT_REDUCESCATTER, "scatter");
  run(SRT_ALLTOALL, "exchange");
  if (rank == 0 || rank == size - 1) run(SRT_SEND, "mail", [&](srt_request& made) { made.destination = size - 1; });
  run_well(context, request(SRT_BARRIER, "end", nullptr, 0));  // the others would leave before
  return results;
}

std::vector<std::vector<std::vector<uint8_t>>> results_on(const Options& options, int size, int64_t count) {
  std::vector<std::vector<std::vector<uint8_t>>> results(static_cast<size_t>(size));
  World ranks(size, options);
  ranks.run(
      [&](int rank, Context& context) { results[static_cast<size_t>(rank)] = results_of(context, rank, size, count); });
  return results;
}

}  // namespace

TEST(every_operation_gives_the_bits_that_tcp_gives) {
  for (const FakeMpi::Manner& manner : {prompt, slow})
    for (const std::vector<int>& hosts : placements)
      for (const char* algorithm : {"auto", "direct", "ring", "recursive_doubling"}) {
        const auto size = static_cast<int>(hosts.size());
        auto knobs = small_chunks;
        knobs.emplace_back("cpu_algorithm", algorithm);
        FakeMpi mpi(size, manner);
        CHECK(results_on(over_mpi(mpi, hosts, knobs), size, 3'001) == results_on(on_hosts(hosts, knobs), size, 3'001));
        CHECK(mpi.sent() > 0);
      }
}

TEST(a_link_carries_more_than_is_in_flight_at_once) {
  FakeMpi mpi(3, slow);
  const std::vector<int> hosts{0, 1, 2};
  CHECK(results_on(over_mpi(mpi, hosts), 3, 700'001) == results_on(on_hosts(hosts), 3, 700'001));
}

TEST(data_goes_over_mpi_and_control_frames_do_not) {
  FakeMpi mpi(2);
  constexpr int64_t elements = 100'000;
  World ranks(2, over_mpi(mpi, {0, 1}));
  ranks.run([](int, Context& context) { run_well(context, FloatSum("x", elements).request); });
  CHECK(sent_over(ranks[0], "mpi") >= 2 * elements);
  CHECK(sent_over(ranks[0], "mpi") < 5 * elements);
  CHECK(sent_over(ranks[0], "tcp") > 0);
  CHECK(sent_over(ranks[0], "tcp") < 10'000);
}

// A message leaves its sender, and reaches its receiver, only after many calls of MPI. Nothing wakes the ranks for
// them, and a sleep of a second each would take longer than the operations may.
TEST(ranks_look_for_messages_while_an_operation_needs_them) {
  FakeMpi mpi(2, {100, 100, 100, false});
  World ranks(2, over_mpi(mpi, {0, 1}, {{"spin", "0"}}));
  ranks.run([](int, Context& context) {
    FloatSum sum("x", 10, 1);
    run_well(context, sum.request);
    CHECK_EQUAL(sum.data[9], 2.0f);
  });
}

// The root's own operation has ended long before, and its program is elsewhere.
TEST(a_rank_without_operations_still_sends_what_is_in_flight) {
  FakeMpi mpi(2, {100, 0, 0, false});
  World ranks(2, over_mpi(mpi, {0, 1}, {{"spin", "0"}}));
  std::atomic<bool> has_arrived{false};
  ranks.run([&](int rank, Context& context) {
    std::vector<float> data(10, static_cast<float>(5 - rank));
    run_well(context, in_place(SRT_BROADCAST, "x", data, int64_t{10}, DType::float32));
    CHECK_EQUAL(data[0], 5.0f);
    if (rank == 1) has_arrived = true;
    has_arrived.wait(false);
    if (rank == 1) has_arrived.notify_all();
  });
}

// A program may end MPI before sirtaki.
TEST(a_rank_without_operations_calls_nothing_of_mpi) {
  FakeMpi mpi(3);
  World ranks(3, over_mpi(mpi, {0, 1, 2}));
  std::atomic<bool> is_over{false};
  std::atomic<int> ready{0};
  ranks.run([&](int rank, Context& context) {
    run_well(context, FloatSum("all", 20'000).request);
    const int32_t pair = add_set(context, {0, 1});
    int64_t before = -1;
    for (int equal = 0; equal < 5; std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
      equal = before == mpi.calls(rank) ? equal + 1 : 0;  // the engine may still look at its last message
      before = mpi.calls(rank);
    }
    for (++ready; ready < 3;) std::this_thread::yield();
    for (int i = 0; rank < 2 && i < 50; ++i) {
      FloatSum sum("pair", 20'000);
      sum.request.process_set = pair;
      run_well(context, sum.request);
    }
    if (rank == 0) is_over = true;
    is_over.wait(false);
    is_over.notify_all();
    CHECK_EQUAL(mpi.calls(rank) > before, rank < 2);
  });
}

TEST(links_over_mpi_are_refused_where_they_do_not_fit) {
  FakeMpi mpi(2);
  const auto refusal = [&](std::vector<int> hosts, std::vector<int32_t> peers, const char* encrypt, size_t bytes) {
    std::string text;
    Options options = on_hosts(hosts, {{"encrypt", encrypt}});
    options.prepare = [&](int rank, Context& context) {
      srt_mpi described = mpi.of(rank);
      described.struct_size = static_cast<uint32_t>(bytes);
      if (rank == 0) text = context.link_mpi(described, peers).text();
    };
    World ranks(2, options);
    ranks.run([](int, Context&) {});
    return text;
  };
  CHECK_EQUAL(refusal({0, 1}, {1}, "0", sizeof(srt_mpi)), "");
  CHECK_EQUAL(refusal({0, 1}, {1}, "0", 8), "srt_mpi is incomplete");
  CHECK_EQUAL(refusal({0, 1}, {1}, "1", sizeof(srt_mpi)),
              "links over MPI are not encrypted, and links between hosts should be");
  CHECK_EQUAL(refusal({0, 0}, {1}, "0", sizeof(srt_mpi)), "MPI links ranks of different hosts only, not rank 1");
  CHECK_EQUAL(refusal({0, 1}, {2}, "0", sizeof(srt_mpi)), "MPI links ranks of different hosts only, not rank 2");
}
