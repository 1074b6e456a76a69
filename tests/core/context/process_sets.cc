// Process sets and join, as threads of one program use them: concurrently, in flight, and until they end.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "plan/request.h"
#include "world.h"

using namespace world;

namespace {

srt_request removal_of(int32_t set) {
  srt_request request = world::request(SRT_REMOVE_PROCESS_SET, nullptr, nullptr, 0);
  request.root = set;
  return request;
}

srt_request join_of(int32_t set) {
  srt_request request = world::request(SRT_JOIN, nullptr, nullptr, 0);
  request.process_set = set;
  return request;
}

void remove_set(Context& context, int32_t set) { run_well(context, removal_of(set)); }

// Numbers that a set sums in place.
struct Sum {
  Sum(std::string its_name, int64_t elements) : name(std::move(its_name)), count(elements) {}

  srt_request request(int32_t set, int32_t value) {
    data.assign(static_cast<size_t>(count), value);
    srt_request made = in_place(SRT_ALLREDUCE, name.c_str(), data, count, DType::int32);
    made.process_set = set;
    return made;
  }
  bool is(int64_t total) const { return std::count(data.begin(), data.end(), total) == count; }

  std::string name;
  int64_t count;
  std::vector<int32_t> data;
};

void on_all(int size, const std::function<void(World&)>& body, const Options& given = {}) {
  for (const Options& options : everywhere(size, given.knobs)) {
    World ranks(size, options);
    body(ranks);
  }
}

}  // namespace

TEST(sets_that_overlap_under_random_timing) {
  const std::vector<std::vector<int64_t>> members{{0, 1, 2, 3}, {0, 1}, {1, 2}, {0, 2}, {0, 1, 3}, {3}};
  for (const Options& options : everywhere(4)) {
    const bool is_fast = options.over == Over::memory && options.hosts.empty();
    const auto rounds = static_cast<int>(check::seeds(is_fast ? 600 : 150));
    World ranks(4, options);
    ranks.run([&](int rank, Context& context) {
      std::mt19937 random(static_cast<uint32_t>(rank));
      std::vector<int32_t> numbers{0};
      for (size_t set = 1; set < members.size(); ++set) numbers.push_back(add_set(context, members[set]));
      std::vector<size_t> own;
      for (size_t set = 0; set < members.size(); ++set)
        if (std::count(members[set].begin(), members[set].end(), rank)) own.push_back(set);
      for (int round = 0; round < rounds && !check::failures(); ++round) {
        std::vector<Sum> sums;
        for (size_t set = 0; set < members.size(); ++set)
          sums.emplace_back("sum." + std::to_string(round % 5), 1 + static_cast<int64_t>(set) * (round % 3) * 400);
        std::shuffle(own.begin(), own.end(), random);
        std::vector<Ticket> handles;
        for (size_t set : own) {
          const srt_request request = sums[set].request(numbers[set], rank + round);
          expect_ok(context.enqueue(&request, 1, &handles.emplace_back()));
          if (random() % 8 == 0) std::this_thread::yield();
          if (random() % 4 == 0) context.flush();
        }
        const auto count = static_cast<int32_t>(handles.size());
        expect_ok(context.wait(handles.data(), count, seconds(60)));
        context.release(handles.data(), count);
        for (size_t set : own)
          CHECK(sums[set].is(std::accumulate(members[set].begin(), members[set].end(), int64_t{0}) +
                             static_cast<int64_t>(members[set].size()) * round));
      }
      for (size_t set = 1; set < members.size(); ++set) remove_set(context, numbers[set]);
    });
  }
}

TEST(a_set_knows_its_members_until_it_is_removed) {
  on_all(3, [](World& ranks) {
    ranks.run([](int rank, Context& context) {
      int32_t known[3] = {};
      CHECK_EQUAL(context.process_set(0, known, 3), 3);
      CHECK_EQUAL(context.process_set(1, known, 3), -1);
      const int32_t set = add_set(context, {0, 2});
      CHECK_EQUAL(set, 1);
      CHECK_EQUAL(context.process_set(set, known, 3), 2);
      CHECK(known[0] == 0 && known[1] == 2);
      Sum sum("x", 5);
      const Status status = end_of(context, sum.request(set, rank));
      if (rank == 1) CHECK(contains(status, "rank 1 is not a member of process set 1, whose ranks are 0, 2"));
      else CHECK(status.is_ok() && sum.is(2));
      remove_set(context, set);
      CHECK_EQUAL(context.process_set(set, known, 3), -1);
      CHECK(contains(end_of(context, sum.request(set, rank)), "there is no process set 1"));
      CHECK(contains(end_of(context, removal_of(set)), "there is no process set 1 that could be removed"));
      CHECK_EQUAL(add_set(context, {0, 2}), 2);
    });
  });
}

// Operations that both members submit before the removal are executed or rejected, but alike on both.
TEST(sets_come_and_go_while_operations_are_in_flight_in_them) {
  on_all(3, [](World& ranks) {
    constexpr int rounds = 60, sums_each = 6;
    std::vector<std::vector<srt_status>> ends(3);
    ranks.run([&](int rank, Context& context) {
      std::mt19937 random(static_cast<uint32_t>(rank) + 10);
      for (int round = 0; round < rounds; ++round) {
        const int32_t set = add_set(context, {1, 2});
        std::vector<Sum> sums;
        std::vector<srt_request> requests;
        for (int i = 0; i < sums_each; ++i) sums.emplace_back("sum." + std::to_string(i), 700);
        for (int i = 0; i < sums_each && rank; ++i) requests.push_back(sums[static_cast<size_t>(i)].request(set, rank));
        requests.push_back(removal_of(set));
        std::vector<Ticket> handles(requests.size());
        for (size_t i = 0; i < requests.size(); ++i) {
          expect_ok(context.enqueue(&requests[i], 1, &handles[i]));
          if (random() % 3 == 0) context.flush();
        }
        const auto count = static_cast<int32_t>(handles.size());
        const Status removed = context.wait(&handles.back(), 1, seconds(60));
        expect_ok(removed);
        const Status all = context.wait(handles.data(), count, seconds(60));
        CHECK(all.is_ok() || contains(all, "was removed before"));
        for (size_t i = 0; i + 1 < handles.size(); ++i) {
          const Status status = context.poll(handles[i]);
          ends[static_cast<size_t>(rank)].push_back(status.code());
          if (status.is_ok()) CHECK(sums[i].is(3));
        }
        context.release(handles.data(), count);
      }
    });
    CHECK_EQUAL(ends[1].size(), size_t{rounds * sums_each});
    CHECK_EQUAL(ends[1], ends[2]);
  });
}

TEST(what_is_left_in_a_removed_set_ends_with_its_name) {
  on_all(3, [](World& ranks) {
    ranks.run([](int rank, Context& context) {
      const int32_t set = add_set(context, {0, 1});
      Sum alone("grad.w", 8);
      Ticket left = 0, joined = 0;
      const srt_request lonely = alone.request(set, rank), joining = join_of(set);
      if (rank == 0) expect_ok(context.enqueue(&lonely, 1, &left));
      if (rank == 0) expect_ok(context.enqueue(&joining, 1, &joined));
      remove_set(context, set);
      if (rank) return;
      for (Ticket handle : {left, joined}) {
        const Status status = context.wait(&handle, 1, seconds(60));
        CHECK_EQUAL(status.code(), SRT_INVALID_ARGUMENT);
        CHECK(contains(status, format("process set %d was removed before ", set)));
      }
      CHECK(contains(context.error(left), "'grad.w'"));
    });
  });
}

// An operation that a rank submits while the set is being removed is rejected or ends.
TEST(submitting_to_a_set_while_it_goes_leaves_nothing_open) {
  on_all(2, [](World& ranks) {
    ranks.run([](int rank, Context& context) {
      for (int round = 0; round < 100; ++round) {
        const int32_t set = add_set(context, {0});
        const srt_request removal = removal_of(set);
        const Ticket removing = start(context, removal);
        context.flush();
        while (rank == 0) {
          Sum sum("x", 3);
          const Status status = end_of(context, round % 2 ? join_of(set) : sum.request(set, 1));
          CHECK(status.is_ok() || status.code() == SRT_INVALID_ARGUMENT);
          if (!status.is_ok()) break;
        }
        expect_ok(context.wait(&removing, 1, seconds(60)));
        context.release(&removing, 1);
      }
    });
  });
}

namespace {

// Runs one operation of each kind among the ranks that have not joined; rank 0 has. `value` is each rank's
// contribution.
void go_on_without_rank_0(Context& context, int rank, int size) {
  const int64_t count = int64_t{size} * 2'000;
  const std::vector<int32_t> input(static_cast<size_t>(count), rank);
  const auto run = [&](int32_t kind, std::vector<int32_t> output, int32_t root = 0, int32_t destination = 0) {
    srt_request request = from_to(world::request(kind, "goes on", &count, 1, DType::int32), input, output);
    request.root = root;
    request.destination = destination;
    std::vector<int32_t> result;
    run_well(context, request, [&](Ticket handle) { result = output_of<int32_t>(context, handle); });
    return result;
  };
  const auto all_are = [](const std::vector<int32_t>& values, size_t count, int32_t expected) {
    return values.size() == count && std::count(values.begin(), values.end(), expected) == static_cast<int64_t>(count);
  };
  const auto elements = static_cast<size_t>(count);
  const int32_t sum = size * (size - 1) / 2;
  std::vector<int32_t> gathered, exchanged;
  for (int from = 1; from < size; ++from) {
    gathered.insert(gathered.end(), elements, from);
    exchanged.insert(exchanged.end(), 2'000, from);
  }
  CHECK(all_are(run(SRT_ALLREDUCE, std::vector<int32_t>(elements)), elements, sum));
  CHECK(all_are(run(SRT_BROADCAST, std::vector<int32_t>(elements), 1), elements, 1));
  CHECK(all_are(run(SRT_REDUCESCATTER, std::vector<int32_t>(2'000)), 2'000, sum));
  CHECK(run(SRT_ALLGATHER, {}) == gathered);
  CHECK(run(SRT_ALLTOALL, {}) == exchanged);
  if (rank == 1) run(SRT_SEND, {}, 1, 2);
  if (rank == 2) CHECK(all_are(run(SRT_SEND, std::vector<int32_t>(elements), 1, 2), elements, 1));
  expect_ok(end_of(context, request(SRT_BARRIER, nullptr, nullptr, 0)));
  // Orthogonal gradients add up; those of the joined rank are zero.
  std::vector<double> orthogonal(static_cast<size_t>(size) * 700);
  std::fill_n(orthogonal.begin() + rank * 700, 700, 3.0);
  const auto many = static_cast<int64_t>(orthogonal.size());
  srt_request adasum = in_place(SRT_ALLREDUCE, "adasum", orthogonal, many, DType::float64);
  adasum.reduce_op = SRT_ADASUM;
  expect_ok(end_of(context, adasum));
  CHECK_EQUAL(std::count(orthogonal.begin(), orthogonal.end(), 3.0), many - 700);
}

}  // namespace

TEST(every_kind_goes_on_without_those_that_have_joined) {
  for (int size : {3, 4})
    on_all(size, [size](World& ranks) {
      ranks.run([size](int rank, Context& context) {
        for (int epoch = 0; epoch < 5; ++epoch) {
          if (rank) {
            for (int step = 0; step < 2; ++step) go_on_without_rank_0(context, rank, size);
            // One rank continues alone until the others have joined, too.
            Sum alone("alone", 5'000);
            if (rank == 1 + epoch % (size - 1)) CHECK(end_of(context, alone.request(0, 7)).is_ok() && alone.is(7));
          }
          run_well(context, join_of(0),
                   [&](Ticket handle) { CHECK_EQUAL(context.result_number(handle), 1 + epoch % (size - 1)); });
        }
        Sum together("together", 10);
        CHECK(end_of(context, together.request(0, rank)).is_ok() && together.is(size * (size - 1) / 2));
      });
    }, {Over::memory, {{"chunk_bytes", "4096"}}, nullptr, true});
}

TEST(a_joined_rank_neither_gives_nor_takes) {
  on_all(3, [](World& ranks) {
    std::atomic<bool> is_refused{false};  // rank 2's further calls; when all have joined, it may call again
    ranks.run([&](int rank, Context& context) {
      if (rank == 2) {
        const srt_request join = join_of(0);
        const Ticket handle = start(context, join);
        context.flush();
        Sum sum("x", 1);
        CHECK(contains(end_of(context, sum.request(0, 1)), "rank 2 has called join() for process set 0"));
        CHECK(contains(end_of(context, join), "rank 2 has called join() for process set 0"));
        is_refused = true;
        expect_ok(context.wait(&handle, 1, seconds(60)));
        return;
      }
      Sum sum("x", 100);
      srt_request broadcast = sum.request(0, rank);
      broadcast.kind = SRT_BROADCAST;
      broadcast.root = 2;
      const Status status = end_of(context, broadcast);
      CHECK_EQUAL(status.code(), SRT_MISMATCH);
      CHECK(contains(status, "rank 2 (pid 102 on here) has joined and has nothing to send"));
      if (rank == 0) {
        srt_request send = sum.request(0, rank);
        send.kind = SRT_SEND;
        send.destination = 2;
        CHECK(contains(end_of(context, send), "rank 2 (pid 102 on here) has joined and takes no part in"));
      }
      while (!is_refused) std::this_thread::yield();
      expect_ok(end_of(context, join_of(0)));
    });
  });
}

// The joined rank sums its slice of several fused tensors in its own memory, and each part is delivered to its owner.
TEST(a_joined_rank_sums_many_tensors_for_the_others) {
  on_all(3, [](World& ranks) {
    ranks.run([](int rank, Context& context) {
      if (rank == 2) return expect_ok(end_of(context, join_of(0)));
      std::vector<Sum> sums;
      for (const char* name : {"a", "b", "c", "d", "e", "f", "g"}) sums.emplace_back(name, 1'000);
      std::vector<srt_request> requests;
      for (Sum& sum : sums) requests.push_back(sum.request(0, 10 * sum.name[0] + rank));
      run_batch_well(context, requests);
      for (const Sum& sum : sums) CHECK(sum.is(20 * sum.name[0] + 1));
      expect_ok(end_of(context, join_of(0)));
    });
  });
}

TEST(a_join_ends_when_a_rank_leaves_and_says_who) {
  for (int leaver : {0, 1, 2})
    on_all(3, [leaver](World& ranks) {
      std::atomic<int> joining{0}, done{0};
      ranks.run([&](int rank, Context& context) {
        Sum sum("x", 4);
        CHECK(end_of(context, sum.request(0, 1)).is_ok());
        if (rank == leaver) {
          while (joining < 2) std::this_thread::yield();
          return;
        }
        const srt_request join = join_of(0);
        const Ticket handle = start(context, join);
        context.flush();
        ++joining;
        const std::string who = format("rank %d (pid %d on here) has finished", leaver, 100 + leaver);
        const Status status = context.wait(&handle, 1, seconds(60));
        CHECK_EQUAL(status.code(), SRT_PEER_FINISHED);
        CHECK(contains(status, who));
        // The rank may submit again, and gets the same error.
        for (const srt_request& request : {sum.request(0, 1), join_of(0), sum.request(0, 1)}) {
          const Status again = end_of(context, request);
          CHECK_EQUAL(again.code(), SRT_PEER_FINISHED);
          CHECK(contains(again, who));
        }
        for (++done; done < 2;) std::this_thread::yield();
      });
    });
}

TEST(a_set_outlives_a_rank_that_is_not_its_member) {
  on_all(3, [](World& ranks) {
    std::atomic<int> done{0};
    ranks.run([&](int rank, Context& context) {
      const int32_t set = add_set(context, {0, 1});
      if (rank == 2) return;
      for (int step = 0; step < 100; ++step) {
        Sum sum("x", 900);
        CHECK(end_of(context, sum.request(set, rank)).is_ok() && sum.is(1));
      }
      CHECK(end_of(context, join_of(set)).is_ok());
      CHECK_EQUAL(end_of(context, removal_of(set)).code(), SRT_PEER_FINISHED);  // removing a set takes all ranks
      for (++done; done < 2;) std::this_thread::yield();
    });
  });
}

TEST(a_pair_sends_on_when_another_rank_has_left) {
  on_all(3, [](World& ranks) {
    std::atomic<int> done{0};
    ranks.run([&](int rank, Context& context) {
      if (rank == 2) return;
      for (int step = 0; step < 100; ++step) {
        Sum mail("mail", 2'000);
        srt_request request = mail.request(0, rank ? -1 : step);
        request.kind = SRT_SEND;
        request.destination = 1;
        CHECK(end_of(context, request).is_ok() && mail.is(step));
        if (step % 10 == 0) CHECK_EQUAL(end_of(context, join_of(0)).code(), SRT_PEER_FINISHED);
      }
      for (++done; done < 2;) std::this_thread::yield();
    });
  });
}
