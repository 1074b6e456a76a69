// GPUs from world to world, as in an elastic job: whatever ends a world, its communicators end with it, nothing is left
// behind, and the next world works in the same process on the same GPUs.
#include <barrier>

#include "gpu_world.h"

using namespace world;

namespace {

constexpr Nanoseconds promptly = seconds(20);  // far above what it takes, and far below the limits that tests set

enum class Ending { planned, failed };

// Returns the number of communicators that were begun and neither destroyed nor aborted.
int open_communicators(const FakeGpu& fake) {
  return fake.calls("ncclCommInitRankConfig") - fake.calls("ncclCommDestroy") - fake.calls("ncclCommAbort");
}

// Runs an all-reduce of ones, and checks its result.
void sum_once(Fake& fake, Context& context, int rank, int size) {
  GpuSum sum(fake, rank, "sum", 20'000);
  run_well(context, sum.request);
  CHECK_EQUAL(sum.values(), std::vector<float>(20'000, static_cast<float>(size)));
}

// Leaves a world as a survivor does, which must take neither the limit that it sets nor a peer.
void leave(Context& context) {
  const Nanoseconds begin = now();
  context.shutdown(seconds(600));
  CHECK(now() - begin < promptly);
}

Options until_lost() {
  Options options = on_gpus({}, Over::sockets);
  options.shut_down = false;
  return options;
}

void work_again(Fake& fake, int size) {
  CHECK_EQUAL(open_communicators(fake), 0);
  World next(size, on_gpus({{"gpu_backend", "nccl"}}));
  next.run([&](int rank, Context& context) { sum_once(fake, context, rank, size); });
}

}  // namespace

TEST(worlds_come_and_go_on_the_same_gpus) {
  Fake fake;
  const int before = fake.alive();
  for (const Ending ending : {Ending::planned, Ending::failed, Ending::planned, Ending::failed})
    for (const int size : {1, 2, 1, 3}) {
      {
        World ranks(size, on_gpus({}, size % 2 ? Over::sockets : Over::memory));
        std::barrier all(size);
        ranks.run([&](int rank, Context& context) {
          for (int step = 0; step < 2; ++step) sum_once(fake, context, rank, size);
          if (ending == Ending::planned) return;
          all.arrive_and_wait();
          if (rank == 0) fake.set("hang", 1);
          all.arrive_and_wait();
          const Launched last(fake, context, rank);
          all.arrive_and_wait();
          if (rank == 0) context.abort("the ranks change");
          if (size > 1) CHECK_EQUAL(context.wait(&last.handle, 1, patience).code(), SRT_ABORTED);
          leave(context);
        });
        CHECK_EQUAL(open_communicators(fake), 0);  // although the contexts still exist
      }
      fake.set("hang", 0);
      CHECK_EQUAL(fake.alive(), before);
    }
}

TEST(a_rank_is_lost_while_communicators_are_made) {
  Fake fake;
  fake.set("init_hang", 1);
  {
    World ranks(3, until_lost());
    std::barrier begun(3);
    ranks.run([&](int rank, Context& context) {
      GpuSum sum(fake, rank, "x");
      const Ticket handle = start(context, sum.request);
      while (fake.calls("ncclCommInitRankConfig") < 3) std::this_thread::yield();
      begun.arrive_and_wait();
      if (rank == 2) return ranks.lose(rank);
      CHECK_EQUAL(context.wait(&handle, 1, patience).code(), SRT_PEER_LOST);
      leave(context);
    });
  }
  fake.set("init_hang", 0);
  work_again(fake, 2);
}

TEST(a_rank_is_lost_in_a_collective_that_was_launched) {
  Fake fake;
  fake.set("hang", 1);
  {
    World ranks(3, until_lost());
    std::barrier all_launched(3);
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 20'000;  // without scratch memory, which a lost rank would not give back
      Launched launched(fake, context, rank, count);
      all_launched.arrive_and_wait();
      if (rank == 2) return ranks.lose(rank);
      CHECK_EQUAL(context.wait(&launched.handle, 1, patience).code(), SRT_PEER_LOST);
      leave(context);
      CHECK_EQUAL(launched.sum.values(), std::vector<float>(count, 1));
    });
  }
  fake.set("hang", 0);
  work_again(fake, 2);
}

TEST(a_rank_is_lost_between_two_collectives) {
  Fake fake;
  {
    World ranks(3, until_lost());
    std::barrier done(3);
    ranks.run([&](int rank, Context& context) {
      sum_once(fake, context, rank, 3);
      done.arrive_and_wait();
      if (rank == 2) return ranks.lose(rank);
      GpuSum sum(fake, rank, "x");
      CHECK_EQUAL(end_of(context, sum.request).code(), SRT_PEER_LOST);
      leave(context);
    });
    CHECK_EQUAL(open_communicators(fake), 0);  // although the contexts still exist
  }
  work_again(fake, 2);
}

// The communicators of a planned change are finalized together, and aborted if a rank does not take part.
TEST(a_rank_is_lost_while_communicators_are_finalized) {
  Fake fake;
  {
    World ranks(3, until_lost());
    std::barrier done(3);
    std::barrier left(3);
    ranks.run([&](int rank, Context& context) {
      sum_once(fake, context, rank, 3);
      done.arrive_and_wait();
      if (rank != 2) leave(context);
      left.arrive_and_wait();
      if (rank == 2) ranks.lose(rank);
    });
    CHECK_EQUAL(fake.calls("ncclCommAbort"), 3);
  }
  work_again(fake, 2);
}

// NCCL's plugins may hang in it.
TEST(a_shutdown_does_not_wait_for_a_communicator_that_is_not_destroyed) {
  Fake fake;
  const int before = fake.alive();
  fake.hold_calls("ncclCommDestroy", 1);
  {
    World ranks(2, on_gpus());
    ranks.run([&](int rank, Context& context) {
      sum_once(fake, context, rank, 2);
      leave(context);
    });
  }
  fake.hold_calls("ncclCommDestroy", 0);
  while (fake.alive() != before) std::this_thread::yield();  // the threads that destroy them have ended
}

// The kernel of one process set runs, and that of the other waits behind it in the stream. The older NCCL ignores
// groups of aborts.
TEST(communicators_of_several_process_sets_are_aborted_together) {
  for (const int version : {22803, 22105}) {
    Fake fake;
    fake.set("nccl_version", version);
    {
      World ranks(3, on_gpus());
      std::barrier all(3);
      ranks.run([&](int rank, Context& context) {
        const int32_t pair = add_set(context, {0, 1});
        all.arrive_and_wait();
        if (rank == 0) fake.set("hang", 1);
        all.arrive_and_wait();
        const Launched first(fake, context, rank);
        const auto second = rank < 2 ? std::make_unique<Launched>(fake, context, rank, 100, pair) : nullptr;
        all.arrive_and_wait();
        if (rank == 0) context.abort("enough");
        CHECK_EQUAL(context.wait(&first.handle, 1, patience).code(), SRT_ABORTED);
        if (second) CHECK_EQUAL(context.wait(&second->handle, 1, patience).code(), SRT_ABORTED);
        leave(context);
      });
    }
    CHECK_EQUAL(fake.calls("ncclCommAbort"), 5);
    fake.set("hang", 0);
    work_again(fake, 3);
  }
}

TEST(a_new_world_works_while_the_old_one_still_exists) {
  Fake fake;
  auto old = std::make_unique<World>(2, on_gpus());
  std::barrier all(2);
  old->run([&](int rank, Context& context) {
    sum_once(fake, context, rank, 2);
    all.arrive_and_wait();
    if (rank == 0) fake.set("hang", 1);
    all.arrive_and_wait();
    const Launched last(fake, context, rank);
    all.arrive_and_wait();
    if (rank == 1) context.abort("the ranks change");
    CHECK_EQUAL(context.wait(&last.handle, 1, patience).code(), SRT_ABORTED);
  });
  fake.set("hang", 0);
  World next(2, on_gpus({{"gpu_backend", "nccl"}}));
  next.run([&](int rank, Context& context) {
    sum_once(fake, context, rank, 2);
    GpuSum sum(fake, rank, "x");
    const Ticket handle = start(context, sum.request);
    if (rank == 0) old.reset();
    expect_ok(context.wait(&handle, 1, patience));
    CHECK_EQUAL(sum.values(), std::vector<float>(100, 2));
  });
}

TEST(a_host_that_waits_learns_of_a_failure_after_the_launch) {
  Fake fake;
  fake.set("hang", 1);
  World ranks(2, on_gpus());
  std::barrier waited(2);
  ranks.run([&](int rank, Context& context) {
    context.wait_on_host();
    GpuSum sum(fake, rank, "x");
    UserStream stream(fake, rank);
    const Ticket handle = start(context, sum.in(stream));
    const auto wait = [&](Nanoseconds timeout) {
      return context.wait_on_stream(&handle, 1, stream.number(), timeout).code();
    };
    while (fake.calls("ncclAllReduce") < 2) CHECK_EQUAL(wait(milliseconds(1)), SRT_IN_PROGRESS);
    CHECK_EQUAL(wait(milliseconds(50)), SRT_IN_PROGRESS);
    waited.arrive_and_wait();
    if (rank == 0) context.abort("a peer is gone");
    CHECK_EQUAL(wait(patience), SRT_ABORTED);
    CHECK_EQUAL(sum.values(), std::vector<float>(100, 1));
  });
}
