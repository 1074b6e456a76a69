// The choice of the all-reduce algorithm, and that every algorithm gives all ranks the same, correct bits.
#include "data/links/algorithm.h"

#include <cmath>
#include <cstring>

#include "world.h"

using namespace world;

namespace {

constexpr int64_t tiny = 64, huge = int64_t{1} << 30;

// Returns each rank's result of an all-reduce.
std::vector<std::vector<float>> sums_of(const Options& options, int size, int64_t count) {
  std::vector<std::vector<float>> results(static_cast<size_t>(size));
  World ranks(size, options);
  ranks.run([&](int rank, Context& context) {
    std::vector<float> data = delicate(rank, count);
    run_well(context, in_place(SRT_ALLREDUCE, "delicate", data, count, DType::float32));
    results[static_cast<size_t>(rank)] = std::move(data);
  });
  return results;
}

// Runs an all-reduce of equal elements.
template <typename T>
void expect_elements(Context& context, const srt_request& request, const std::vector<T>& data, T expected) {
  run_well(context, request);
  CHECK(data == std::vector<T>(data.size(), expected));
}

}  // namespace

TEST(small_sums_between_hosts_take_few_waits_and_large_ones_spread) {
  CHECK(choose_algorithm("auto", {1, 1}, tiny) == Algorithm::recursive_doubling);
  CHECK(choose_algorithm("auto", {1, 1}, huge) == Algorithm::direct);
  CHECK(choose_algorithm("auto", {1, 1, 1}, tiny) == Algorithm::direct);
  CHECK(choose_algorithm("auto", {1, 1, 1}, huge) == Algorithm::direct);
  for (int64_t bytes : {tiny, huge}) {
    CHECK(choose_algorithm("auto", {4, 4}, bytes) == Algorithm::hierarchical);
    CHECK(choose_algorithm("auto", {3, 1}, bytes) == Algorithm::hierarchical);
    CHECK(choose_algorithm("auto", {4}, bytes) == Algorithm::direct);
  }
}

TEST(a_wish_counts_wherever_it_can) {
  for (const std::vector<int>& members : {std::vector<int>{4, 4}, {1, 1}, {3}}) {
    CHECK(choose_algorithm("direct", members, tiny) == Algorithm::direct);
    CHECK(choose_algorithm("ring", members, tiny) == Algorithm::ring);
    CHECK(choose_algorithm("recursive_doubling", members, huge) == Algorithm::recursive_doubling);
  }
  CHECK(choose_algorithm("hierarchical", {2, 1}, huge) == Algorithm::hierarchical);
  CHECK(choose_algorithm("hierarchical", {1, 1}, huge) == Algorithm::direct);  // no host has several members
}

TEST(members_are_counted_by_host) {
  const std::vector<int32_t> host_of{0, 1, 0, 1, 2, 0};
  CHECK_EQUAL(count_members({0, 1, 2, 3, 4, 5}, host_of), (std::vector<int>{3, 2, 1}));
  CHECK_EQUAL(count_members({1, 3}, host_of), std::vector<int>{2});
  CHECK_EQUAL(count_members({2, 4}, host_of), (std::vector<int>{1, 1}));
}

TEST(a_world_says_what_it_uses) {
  CHECK_EQUAL(describe_algorithm("auto", {4, 4}, "auto"),
              "8 ranks on 2 hosts: all-reduce goes through shared memory inside a host and over TCP between hosts "
              "(hierarchical); SIRTAKI_CPU_ALGORITHM changes that");
  CHECK_EQUAL(describe_algorithm("ring", {4, 4}, "auto"),
              "8 ranks on 2 hosts: all-reduce goes over TCP between hosts (ring); SIRTAKI_CPU_ALGORITHM changes that");
  CHECK_EQUAL(
      describe_algorithm("direct", {1, 1}, "mpi"),
      "2 ranks on 2 hosts: all-reduce goes over MPI between hosts (direct); SIRTAKI_CPU_ALGORITHM changes that");
}

TEST(all_ranks_get_the_same_bits_in_each_run) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1, 0, 2}, {0, 1, 2}})
    for (const char* algorithm : {"auto", "direct", "ring", "recursive_doubling", "hierarchical"})
      for (int64_t count : check::of<int64_t>({1, 77, 60'001})) {
        const auto size = static_cast<int>(hosts.size());
        const Options options = on_hosts(hosts, {{"cpu_algorithm", algorithm}, {"chunk_bytes", "4096"}});
        const auto first = sums_of(options, size, count);
        for (const auto& of_rank : first) CHECK(of_rank == first.front());
        CHECK(sums_of(options, size, count) == first);
      }
}

// Division happens once, at the end: four ones average to one, and not to (1 + 1) / 4 plus the same.
TEST(averages_are_divided_once_in_every_algorithm) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1, 2, 3}, {0, 0, 1, 1}, {0, 0, 0, 0}})
    for (const char* algorithm : {"direct", "ring", "recursive_doubling", "hierarchical"}) {
      World ranks(4, on_hosts(hosts, {{"cpu_algorithm", algorithm}}));
      ranks.run([&](int, Context& context) {
        const int64_t count = 1'003;
        std::vector<int32_t> data(static_cast<size_t>(count), 1);
        srt_request request = in_place(SRT_ALLREDUCE, "ones", data, count, DType::int32);
        request.reduce_op = SRT_AVERAGE;
        expect_elements(context, request, data, 1);
      });
    }
}

// The two counts cover both ways to send elements: long tensors are sent in place, short ones are copied first.
TEST(factors_apply_once_in_every_algorithm) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1, 2, 3}, {0, 0, 1, 1}, {0, 0, 0, 0}})
    for (const char* algorithm : {"direct", "ring", "recursive_doubling", "hierarchical"})
      for (int64_t count : {int64_t{1'003}, int64_t{60'001}}) {
        World ranks(4, on_hosts(hosts, {{"cpu_algorithm", algorithm}}));
        ranks.run([&](int rank, Context& context) {
          FloatSum sum("scaled", count, static_cast<float>(rank));
          sum.request.prescale = 0.5;
          sum.request.postscale = 8;
          expect_elements(context, sum.request, sum.data, 24.0f);
        });
      }
}

// A zero has two signs, and a maximum's sign depends on the order of its arguments; it must not differ between ranks.
TEST(all_ranks_get_the_same_zero) {
  for (const char* algorithm : {"direct", "ring", "recursive_doubling"})
    for (const int32_t op : {SRT_MIN, SRT_MAX}) {
      constexpr int size = 4;
      const int64_t count = 100;
      std::vector<std::vector<float>> results(size);
      World ranks(size, on_hosts({0, 1, 2, 3}, {{"cpu_algorithm", algorithm}}));
      ranks.run([&](int rank, Context& context) {
        std::vector<float>& data = results[static_cast<size_t>(rank)];
        for (int64_t i = 0; i < count; ++i) data.push_back(i >> rank & 1 ? -0.0f : 0.0f);
        srt_request request = in_place(SRT_ALLREDUCE, "zeros", data, count, DType::float32);
        request.reduce_op = op;
        run_well(context, request);
      });
      for (const auto& of_rank : results) CHECK_EQUAL(std::memcmp(of_rank.data(), results[0].data(), 4 * count), 0);
    }
}

// Adasum of equal vectors returns that vector, so only the factors show in the result.
TEST(adasum_applies_its_factors) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0, 0}, {0, 1, 2, 3}, {0, 0, 1, 1}}) {
    World ranks(4, on_hosts(hosts));
    ranks.run([&](int, Context& context) {
      FloatSum sum("equal", 1'003, 1);
      sum.request.reduce_op = SRT_ADASUM;
      sum.request.prescale = 2;
      sum.request.postscale = 4;
      expect_elements(context, sum.request, sum.data, 8.0f);
    });
  }
}

// Fusion depends on when tensors become ready, and must not affect the result.
TEST(a_sum_does_not_depend_on_what_comes_behind_it) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1}, {0, 1, 2, 3}, {0, 0, 1, 1, 2, 2}, {0, 1, 1, 2, 0, 2}}) {
    const auto size = static_cast<int>(hosts.size());
    const auto together = sums_of(on_hosts(hosts), size, 60'001).front();
    const auto alone = sums_of(on_hosts(hosts), size, 1'000).front();
    CHECK(std::equal(alone.begin(), alone.end(), together.begin()));
  }
}

TEST(direct_gives_the_same_bits_wherever_ranks_live) {
  for (int64_t count : {int64_t{5}, int64_t{60'001}}) {
    const auto on_one = sums_of(over(Over::memory), 4, count);
    for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 2}, {0, 0, 0, 0}})
      CHECK(sums_of(on_hosts(hosts, {{"cpu_algorithm", "direct"}}), 4, count) == on_one);
  }
}

// The plans are large enough for several pieces; scaled, averaged, and with a joined rank.
TEST(large_plans_between_hosts_are_cut_into_pieces) {
  for (const std::vector<int>& hosts : check::of<std::vector<int>>({{0, 0, 1, 1}, {0, 1, 1, 1}, {0, 0, 0, 1}})) {
    World ranks(4, on_hosts(hosts, {{"sockets_per_link", "2"}}));
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 5'000'003;
      for (int step = 0; step < 2; ++step) {
        const bool is_away = step == 1 && rank == 3;
        srt_request join = world::request(SRT_JOIN, nullptr, nullptr, 0);
        Ticket joined = 0, handle = 0;
        std::vector<int32_t> data(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = static_cast<int32_t>(i % 1'000) + rank;
        srt_request request = in_place(SRT_ALLREDUCE, "large", data, count, DType::int32);
        request.reduce_op = SRT_AVERAGE;
        request.prescale = 2;
        if (!is_away) {
          expect_ok(run_one(context, request, handle, seconds(100)));
          int64_t wrong = 0;
          const int contributors = step ? 3 : 4, sum_of_ranks = step ? 3 : 6;
          for (int64_t i = 0; i < count; ++i)
            wrong += data[static_cast<size_t>(i)] != 2 * (i % 1'000 * contributors + sum_of_ranks) / 4;
          CHECK_EQUAL(wrong, 0);
        }
        if (step == 1) expect_ok(run_one(context, join, joined, seconds(100)));
      }
    });
  }
}

namespace {

// Returns this rank's rows of the sum of delicate numbers.
std::vector<float> scattered(Context& context, int rank, int size, int64_t count, double prescale) {
  const std::vector<float> input = delicate(rank, count);
  const auto own = static_cast<size_t>(rank), members = static_cast<size_t>(size);
  std::vector<float> rows(static_cast<size_t>(rows_of_member(count, members, own)));
  srt_request scatter = request(SRT_REDUCESCATTER, "rows", &count, 1, DType::float32);
  scatter.input = reinterpret_cast<uintptr_t>(input.data());
  scatter.output = reinterpret_cast<uintptr_t>(rows.data());
  scatter.output_bytes = static_cast<int64_t>(rows.size() * sizeof(float));
  scatter.prescale = prescale;
  run_well(context, scatter);
  return rows;
}

// Returns a rank's rows of the whole.
std::vector<float> rows_of(const std::vector<float>& whole, int rank, int size) {
  const auto own = static_cast<size_t>(rank), members = static_cast<size_t>(size);
  const auto rows = static_cast<int64_t>(whole.size());
  auto first = whole.begin();
  for (size_t member = 0; member < own; ++member) first += rows_of_member(rows, members, member);
  return {first, first + rows_of_member(rows, members, own)};
}

int64_t sent_over_tcp(Context& context) {
  srt_sent_bytes found[8];
  int64_t total = 0;
  for (int32_t row = 0, known = context.count_sent_bytes(found, 8); row < known; ++row)
    if (std::string_view(found[row].transport) == "tcp") total += found[row].bytes;
  return total;
}

}  // namespace

TEST(a_reducescatter_between_hosts_has_the_bits_of_an_allreduce) {
  for (const std::vector<int>& hosts : check::of<std::vector<int>>({{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 2, 2}}))
    for (int64_t count : {int64_t{3}, int64_t{1'003}, int64_t{3'000'007}}) {
      const auto size = static_cast<int>(hosts.size());
      World ranks(size, on_hosts(hosts, {}));
      ranks.run([&](int rank, Context& context) {
        std::vector<float> whole = delicate(rank, count);
        srt_request reduce = in_place(SRT_ALLREDUCE, "whole", whole, count, DType::float32);
        reduce.prescale = 3;
        run_well(context, reduce);
        CHECK(scattered(context, rank, size, count, 3) == rows_of(whole, rank, size));
      });
    }
}

// Among 2 hosts of 2, each rank sends the sums of its host for one member of the other: a quarter of all bytes. Each
// rank's own values for both members there would be half of them.
TEST(a_reducescatter_sends_sums_between_hosts) {
  World ranks(4, on_hosts({0, 0, 1, 1}, {}));
  ranks.run([&](int rank, Context& context) {
    constexpr int64_t elements = 400'000, quarter = elements * sizeof(float) / 4;
    const int64_t before = sent_over_tcp(context);
    scattered(context, rank, 4, elements, 1);
    const int64_t sent = sent_over_tcp(context) - before;
    CHECK(sent >= quarter);
    CHECK(sent < quarter + quarter / 2);
  });
}

namespace {

// Averages equal elements by a reduce-scatter, and by an all-reduce if `reduces`, among 2 hosts of 2.
template <typename T>
void expect_average(DType dtype, T value, bool reduces) {
  World ranks(4, on_hosts({0, 0, 1, 1}, {}));
  ranks.run([&](int, Context& context) {
    const int64_t count = 4'000;
    std::vector<T> data(static_cast<size_t>(count), value), rows(data.size() / 4);
    srt_request scatter = request(SRT_REDUCESCATTER, "rows", &count, 1, dtype);
    scatter.input = reinterpret_cast<uintptr_t>(data.data());
    scatter.output = reinterpret_cast<uintptr_t>(rows.data());
    scatter.output_bytes = static_cast<int64_t>(rows.size() * sizeof(T));
    scatter.reduce_op = SRT_AVERAGE;
    run_well(context, scatter);
    CHECK(rows == std::vector<T>(rows.size(), value));
    if (!reduces) return;
    srt_request reduce = in_place(SRT_ALLREDUCE, "whole", data, count, dtype);
    reduce.reduce_op = SRT_AVERAGE;
    expect_elements(context, reduce, data, value);
  });
}

}  // namespace

TEST(averages_do_not_pass_through_sums_that_their_dtype_cannot_hold) {
  expect_average<int8_t>(DType::int8, 100, true);
  expect_average<uint16_t>(DType::uint16, 40'000, true);
  expect_average<uint16_t>(DType::float16, 0x78e2, false);      // 40,000
  expect_average<uint8_t>(DType::float8_e4m3fn, 0x7a, false);  // 320
}

TEST(a_reducescatter_among_hosts_of_different_sizes_sums_in_rank_order) {
  World ranks(3, on_hosts({0, 0, 1}, {}));
  ranks.run([&](int rank, Context& context) {
    constexpr int64_t count = 3'001;
    std::vector<float> whole(count);
    for (int from = 0; from < 3; ++from) {
      const std::vector<float> values = delicate(from, count);
      for (size_t i = 0; i < whole.size(); ++i) whole[i] += values[i];
    }
    CHECK(scattered(context, rank, 3, count, 1) == rows_of(whole, rank, 3));
  });
}

TEST(rows_cross_hosts_once_while_ranks_have_joined) {
  for (const std::vector<int>& hosts : placements) {
    const auto size = static_cast<int>(hosts.size());
    World ranks(size, on_hosts(hosts, {{"chunk_bytes", "4096"}}));
    ranks.run([&](int rank, Context& context) {
      if (rank != 0) {
        const int64_t rows = rank * 500;
        const std::vector<int32_t> part(static_cast<size_t>(rows), rank);
        srt_request gather = world::request(SRT_ALLGATHER, "rows", &rows, 1, DType::int32);
        gather.input = reinterpret_cast<uintptr_t>(part.data());
        std::vector<int32_t> expected;
        for (int from = 1; from < size; ++from) expected.insert(expected.end(), static_cast<size_t>(from * 500), from);
        run_well(context, gather, [&](Ticket handle) { CHECK(output_of<int32_t>(context, handle) == expected); });
        const int64_t count = 30'000;
        std::vector<int32_t> data(static_cast<size_t>(count), rank);
        srt_request broadcast = in_place(SRT_BROADCAST, "given", data, count, DType::int32);
        broadcast.root = size - 1;
        run_well(context, broadcast);
        CHECK_EQUAL(std::count(data.begin(), data.end(), size - 1), count);
      }
      run_well(context, world::request(SRT_JOIN, nullptr, nullptr, 0));
    });
  }
}
