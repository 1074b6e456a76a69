// Ranks of several hosts negotiate through leaders: real engines, in trees of hosts of every shape.
#include <atomic>

#include "faulty_wire.h"
#include "world.h"

using namespace world;

namespace {

using Knobs = std::vector<std::pair<std::string, std::string>>;

struct Shape {
  std::vector<int> hosts;
  const char* fan_out;
};

// Shapes with one child host per host, two per host, and many, and with hosts whose ranks are not consecutive.
const std::vector<Shape> shapes{{{0, 0, 1, 1, 2, 2, 3}, "1"},
                                {{0, 1, 2, 3, 4, 5}, "2"},
                                {{0, 0, 1, 1, 1, 2, 3, 3}, "16"},
                                {{0, 1, 2, 0, 1, 2, 1}, "1"}};

Options in_shape(const Shape& shape, Knobs knobs = {}) {
  knobs.insert(knobs.end(), {{"log_descriptor", "-1"}, {"control_fan_out", shape.fan_out}});
  return on_hosts(shape.hosts, knobs);
}

srt_request in(int32_t set, srt_request request) {
  request.process_set = set;
  return request;
}

void sum(Context& context, const char* name, int32_t set, int32_t value, int32_t expected) {
  const int64_t count = 100;
  std::vector<int32_t> data(static_cast<size_t>(count), value);
  run_well(context, in(set, in_place(SRT_ALLREDUCE, name, data, count, DType::int32)));
  CHECK_EQUAL(std::count(data.begin(), data.end(), expected), count);
}

}  // namespace

TEST(trees_of_any_shape_do_the_same) {
  for (const Shape& shape : shapes) {
    const int size = static_cast<int>(shape.hosts.size());
    const int total = size * (size - 1) / 2;
    World ranks(size, in_shape(shape));
    ranks.run([&](int rank, Context& context) {
      std::vector<int64_t> odd_ranks;
      int32_t odd_total = 0;
      for (int odd = 1; odd < size; odd += 2) {
        odd_ranks.push_back(odd);
        odd_total += odd;
      }
      const int32_t odds = add_set(context, odd_ranks);
      for (int step = 0; step < static_cast<int>(check::seeds(20)); ++step) {
        sum(context, "world", 0, rank, total);
        if (rank % 2) sum(context, "odds", odds, rank + step, odd_total + step * static_cast<int>(odd_ranks.size()));
        const int64_t rows = (rank + step) % 3;
        const std::vector<int32_t> own(static_cast<size_t>(rows), rank);
        srt_request gather = request(SRT_ALLGATHER, "rows", &rows, 1, DType::int32);
        gather.input = reinterpret_cast<uintptr_t>(own.data());
        run_well(context, gather, [&](Ticket handle) {
          std::vector<int32_t> expected;
          for (int from = 0; from < size; ++from) expected.insert(expected.end(), (from + step) % 3, from);
          CHECK_EQUAL(output_of<int32_t>(context, handle), expected);
        });
        run_well(context, request(SRT_BARRIER, "barrier", nullptr, 0));
      }
    });
  }
}

TEST(ranks_below_a_leader_join_one_after_the_other) {
  for (const Shape& shape : shapes) {
    const int size = static_cast<int>(shape.hosts.size());
    World ranks(size, in_shape(shape));
    ranks.run([&](int rank, Context& context) {
      for (int round = 0; round < 3; ++round) {
        for (int step = 0; step < rank; ++step) {
          int still_there = 0;
          for (int other = 0; other < size; ++other) still_there += other > step;
          sum(context, "uneven", 0, 1, still_there);
        }
        run_well(context, request(SRT_JOIN, nullptr, nullptr, 0));
        sum(context, "after", 0, 1, size);
      }
    });
  }
}

// A leader that has left still relays for sets that it does not belong to.
TEST(sets_go_on_below_a_leader_that_has_left) {
  for (const char* fan_out : {"1", "16"}) {
    World ranks(6, in_shape({{0, 1, 1, 1, 2, 2}, fan_out}));
    std::atomic<int> leavers{0};
    ranks.run([&](int rank, Context& context) {
      const int32_t below = add_set(context, {2, 3}), across = add_set(context, {3, 5});
      if (rank == 0 || rank == 1 || rank == 4) {  // all leaders
        ++leavers;
        return;
      }
      while (leavers < 3) std::this_thread::yield();
      for (int step = 0; step < 50; ++step) {
        if (rank < 4) sum(context, "below", below, rank, 5);
        if (rank != 2) sum(context, "across", across, rank, 8);
      }
    });
  }
}

// Leaders that are not inside a call still relay.
TEST(ranks_below_two_leaders_go_on_while_these_do_something_else) {
  for (const char* fan_out : {"1", "16"}) {
    World ranks(6, in_shape({{0, 0, 1, 1, 2, 2}, fan_out}));
    std::atomic<int> done{0};
    ranks.run([&](int rank, Context& context) {
      const int32_t across = add_set(context, {3, 5});
      if (rank % 2 == 0 || rank == 1) {
        while (done < 2) std::this_thread::yield();
        return;
      }
      for (int step = 0; step < 50; ++step) sum(context, step % 10 ? "x" : "y", across, rank, 8);
      ++done;
    });
  }
}

// The leader relays for its descendants up to the deadline of its shutdown. Peers on other hosts that wait for these
// descendants must not wait for ever.
TEST(ranks_below_a_leader_that_does_not_wait_for_them_can_take_part_in_nothing) {
  Options options = in_shape({{0, 1, 1, 2}, "16"});
  options.shut_down = false;
  World ranks(4, std::move(options));
  std::atomic<bool> has_left{false};
  std::atomic<int> begun{0}, done{0};
  ranks.run([&](int rank, Context& context) {
    const int32_t across = add_set(context, {2, 3});
    if (rank >= 2) sum(context, "x", across, rank, 5);
    ++begun;
    if (rank == 1) {
      while (begun < 4) std::this_thread::yield();
      context.shutdown(0);
      has_left = true;
      return;
    }
    if (rank >= 2) {
      while (!has_left) std::this_thread::yield();
      const int64_t count = 100;
      std::vector<int32_t> data(100);
      const Status status = end_of(context, in(across, in_place(SRT_ALLREDUCE, "x", data, count, DType::int32)));
      CHECK_EQUAL(status.code(), SRT_PEER_FINISHED);
      CHECK(contains(status, format("rank %d (pid ", rank - 1)));
    }
    for (++done; done < 3;) std::this_thread::yield();
    context.shutdown(seconds(20));
  });
}

// Simulates the loss of the leader's machine or network; another leader is below it.
TEST(a_leader_whose_links_break_ends_every_rank) {
  constexpr int leader = 2;
  std::vector<Descriptor> others_ends;
  Options options = in_shape({{0, 0, 1, 1, 2}, "1"});
  options.connect = [&](int a, int b, int* ends) {
    if (!tcp_pair(ends)) return false;
    if (a == leader || b == leader) others_ends.push_back(Descriptor::duplicate(ends[0]));
    return true;
  };
  World ranks(5, std::move(options));
  ranks.run([&](int rank, Context& context) {
    const int64_t count = 100;
    std::vector<int32_t> data(100);
    Status status;
    for (int step = 0; status.is_ok(); ++step) {
      if (rank == leader && step == 20)
        for (const Descriptor& end : others_ends) ::shutdown(end.get(), SHUT_RDWR);
      status = end_of(context, in_place(SRT_ALLREDUCE, "x", data, count, DType::int32));
    }
    CHECK_EQUAL(status.code(), SRT_PEER_LOST);
    const bool is_elsewhere = rank != leader && rank != leader + 1;
    if (is_elsewhere) CHECK(contains(status, "rank 2 (pid 102 on here) was lost"));
  });
}

// The rank that leaves may be several hosts further up; the ranks that need it get its name.
TEST(whoever_has_left_above_is_named) {
  for (int leaver : {0, 1, 2}) {
    World ranks(5, in_shape({{0, 1, 2, 3, 3}, "1"}));
    std::atomic<int> done{0};
    ranks.run([&](int rank, Context& context) {
      sum(context, "x", 0, 1, 5);
      if (rank == leaver) return;
      const int64_t count = 100;
      std::vector<int32_t> data(100);
      for (int attempt = 0; attempt < 2; ++attempt) {
        const Status status = end_of(context, in_place(SRT_ALLREDUCE, "x", data, count, DType::int32));
        CHECK_EQUAL(status.code(), SRT_PEER_FINISHED);
        CHECK(contains(status, format("rank %d (pid %d on ", leaver, 100 + leaver)));
      }
      for (++done; done < 4;) std::this_thread::yield();
    });
  }
}

TEST(a_late_rank_of_another_host_is_known_by_number) {
  World ranks(6, in_shape({{0, 0, 1, 1, 2, 2}, "1"}));
  ranks.run([](int rank, Context& context) {
    for (int step = 0; step < 4; ++step) {
      if (rank == 5) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      sum(context, "x", 0, 1, 6);
    }
    srt_statistics statistics{};
    statistics.struct_size = sizeof statistics;
    std::vector<srt_lateness> lateness(6);
    context.statistics(statistics, lateness.data());
    CHECK(lateness[5].times > 0);
    CHECK(lateness[5].longest > 0.1);
    for (const srt_lateness& other : std::span(lateness).first(5)) CHECK(other.total < lateness[5].total);
  });
}

TEST(a_rank_of_another_host_that_never_comes_is_given_up_by_name) {
  World ranks(4, in_shape({{0, 0, 1, 1}, "16"}, {{"stall_report", "0.1"}, {"stall_deadline", "1"}}));
  ranks.run([](int rank, Context& context) {
    sum(context, "x", 0, 1, 4);
    const int64_t count = 10;
    std::vector<int32_t> data(10);
    const srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, DType::int32);
    if (rank == 3) {
      while (context.death_text()[0] == 0) std::this_thread::yield();
      CHECK_EQUAL(end_of(context, request).code(), SRT_TIMEOUT);
      return;
    }
    const Status status = end_of(context, request);
    CHECK_EQUAL(status.code(), SRT_TIMEOUT);
    CHECK(contains(status, "rank 3 (pid 103 on here) has not submitted it"));
  });
}

// The faulty link leads from the leader of the second host to the coordinator.
TEST(aggregates_that_are_damaged_on_their_way_end_every_rank_or_change_nothing) {
  for (const Fault fault : {Fault::cut, Fault::corrupt})
    for (size_t after : {0, 17, 40, 100, 200, 333, 500, 1'000, 2'000}) {
      Wire wire(fault, after);
      Options options = in_shape({{0, 0, 1, 1}, "16"}, {{"progress_deadline", "3"}, {"stall_deadline", "3"}});
      options.connect = wire.between(2, 0);
      World ranks(4, std::move(options));
      ranks.run([&](int, Context& context) {
        const int64_t rows = 1;
        const int32_t own = 1;
        srt_request gather = request(SRT_ALLGATHER, "g", &rows, 1, DType::int32);
        gather.input = reinterpret_cast<uintptr_t>(&own);
        for (int step = 0; step < 20; ++step) {
          for (const srt_request& one : {request(SRT_BARRIER, "b", nullptr, 0), gather}) {
            const Status status = end_of(context, one);
            if (fault == Fault::cut) CHECK(status.is_ok() || status.code() == SRT_PEER_LOST);
            else CHECK(status.code() != SRT_IN_PROGRESS);
          }
        }
      });
    }
}
