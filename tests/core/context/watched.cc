// Watched operations: a thread sleeps until they have ended, and the engine's own thread drives them.
#include <barrier>

#include "world.h"

using namespace sirtaki;
using namespace world;

namespace {

constexpr Nanoseconds patience = seconds(60);

// Sleeps until operations are reported; returns their handles.
std::vector<Ticket> reports(Context& context, int32_t capacity = 8) {
  std::vector<Ticket> handles(static_cast<size_t>(capacity));
  int32_t count = 0;
  expect_ok(context.wait_watched(handles.data(), capacity, count, patience));
  handles.resize(static_cast<size_t>(count));
  return handles;
}

// Returns the status of a call that is to find nothing to report.
srt_status nothing_reported(Context& context, Nanoseconds limit = 0) {
  Ticket handle = 0;
  int32_t count = -1;
  const srt_status status = context.wait_watched(&handle, 1, count, limit).code();
  CHECK_EQUAL(count, 0);
  return status;
}

}  // namespace

TEST(an_operation_that_nobody_waits_for_ends_and_is_reported) {
  for (int size : {1, 2, 3})
    for (Over transport : {Over::memory, Over::sockets}) {
      World ranks(size, over(transport));
      ranks.run([size](int, Context& context) {
        for (int step = 0; step < 20; ++step) {
          const FloatSum sum("x", 100, 1);
          const Ticket handle = start(context, sum.request);
          expect_ok(context.watch(&handle, 1));
          CHECK(reports(context) == std::vector<Ticket>{handle});
          CHECK_EQUAL(sum.data[99], static_cast<float>(size));
          context.release(&handle, 1);
        }
        CHECK_EQUAL(nothing_reported(context), SRT_IN_PROGRESS);
      });
    }
}

TEST(operations_are_reported_in_the_order_in_which_they_end) {
  World ranks(2, over(Over::memory));
  std::barrier first_has_ended(2);
  ranks.run([&](int rank, Context& context) {
    const FloatSum early("early"), late("late");
    Ticket handles[2]{};
    if (rank == 0) {
      handles[0] = start(context, late.request);
      expect_ok(context.watch(&handles[0], 1));
      handles[1] = start(context, early.request);
      expect_ok(context.watch(&handles[1], 1));
      CHECK(reports(context) == std::vector<Ticket>{handles[1]});
      first_has_ended.arrive_and_wait();
      CHECK(reports(context) == std::vector<Ticket>{handles[0]});
    } else {
      handles[0] = start(context, early.request);
      expect_ok(context.wait(&handles[0], 1, patience));
      first_has_ended.arrive_and_wait();
      handles[1] = start(context, late.request);
      expect_ok(context.wait(&handles[1], 1, patience));
    }
    context.release(handles, 2);
  });
}

TEST(what_has_ended_before_it_is_watched_is_reported_at_once) {
  World ranks(2, over(Over::memory));
  ranks.run([](int, Context& context) {
    const FloatSum one("one"), two("two"), unwatched("three");
    const Ticket handles[]{start(context, one.request), start(context, two.request), start(context, unwatched.request)};
    expect_ok(context.wait(handles, 3, patience));
    CHECK_EQUAL(nothing_reported(context), SRT_IN_PROGRESS);
    expect_ok(context.watch(handles, 2));
    CHECK(reports(context, 1) == std::vector<Ticket>{handles[0]});
    CHECK(reports(context, 1) == std::vector<Ticket>{handles[1]});
    CHECK_EQUAL(nothing_reported(context), SRT_IN_PROGRESS);
    context.release(handles, 3);
    CHECK_EQUAL(context.watch(handles, 1).code(), SRT_INVALID_ARGUMENT);
  });
}

TEST(a_dead_context_reports_its_failed_operations_first) {
  World ranks(2, over(Over::memory));
  ranks.run([](int rank, Context& context) {
    const FloatSum alone("alone");
    const Ticket handle = rank == 0 ? start(context, alone.request) : 0;
    if (rank == 0) {
      expect_ok(context.watch(&handle, 1));
      const FloatSum together("together");
      std::ignore = end_of(context, together.request);
      CHECK(reports(context) == std::vector<Ticket>{handle});
      CHECK_EQUAL(context.poll(handle).code(), SRT_ABORTED);
      CHECK_EQUAL(nothing_reported(context, patience), SRT_ABORTED);
    } else {
      const FloatSum together("together");
      run_well(context, together.request);
      context.abort("enough");
    }
  });
}

TEST(a_shutdown_wakes_the_thread_that_sleeps) {
  for (int size : {1, 2}) {
    World ranks(size, over(Over::memory));
    std::vector<std::thread> sleepers;
    for (int rank = 0; rank < size; ++rank)
      sleepers.emplace_back([&, rank] { CHECK_EQUAL(nothing_reported(ranks[rank], patience), SRT_SHUT_DOWN); });
    ranks.run([](int, Context&) {});
    for (auto& sleeper : sleepers) sleeper.join();
  }
}

TEST(a_forked_child_is_told_so) {
  World ranks(1, {Over::memory, {}, nullptr, false});
  const FloatSum sum("x", 100, 1);
  const Ticket handle = start(ranks[0], sum.request);
  expect_ok(ranks[0].wait(&handle, 1, patience));
  ranks.fork_child(0);
  CHECK_EQUAL(ranks[0].watch(&handle, 1).code(), SRT_FORKED);
  CHECK_EQUAL(nothing_reported(ranks[0], patience), SRT_FORKED);
}
