// Ranks that leave, fail or are lost while MPI moves the data between their hosts.
#include <atomic>
#include <thread>

#include "fake_mpi.h"

using namespace world;

TEST(what_is_in_flight_at_the_end_arrives) {
  FakeMpi mpi(2, {50, 10, 10, false});
  World ranks(2, over_mpi(mpi, {0, 1}));
  constexpr int64_t count = 1'000'000;
  ranks.run([&](int rank, Context& context) {
    std::vector<float> data(count, static_cast<float>(5 - rank));
    const Ticket handle = start(context, in_place(SRT_BROADCAST, "x", data, count, DType::float32));
    if (rank == 1) expect_ok(context.wait(&handle, 1, seconds(60)));
    else context.shutdown(seconds(20));
    CHECK(data == std::vector<float>(count, 5));
    context.release(&handle, 1);
  });
}

// The end of rank 0's connection overtakes bytes that MPI still moves.
TEST(what_arrives_after_the_end_of_its_sender_counts) {
  FakeMpi mpi(2, {0, 0, 0, true});
  World ranks(2, over_mpi(mpi, {0, 1}));
  constexpr int64_t count = 200'000;
  mpi.stall(1);
  ranks.run([&](int rank, Context& context) {
    std::vector<float> data(count, static_cast<float>(5 - rank));
    const Ticket handle = start(context, in_place(SRT_BROADCAST, "x", data, count, DType::float32));
    if (rank == 0) {
      context.shutdown(seconds(20));
      std::this_thread::sleep_for(std::chrono::milliseconds(500));  // a loss is noticed within 200 ms
      mpi.stall(1, false);
    } else {
      expect_ok(context.wait(&handle, 1, seconds(60)));
    }
    CHECK(data == std::vector<float>(count, 5));
    context.release(&handle, 1);
  });
}

// A root sends more than what is in flight at once, and its receiver leaves: nobody takes the rest.
TEST(a_sender_goes_on_after_its_receiver_has_left) {
  FakeMpi mpi(2);
  World ranks(2, over_mpi(mpi, {0, 1}));
  constexpr int64_t count = 3'000'000;
  mpi.hold(1);
  ranks.run([&](int rank, Context& context) {
    std::vector<float> data(count);
    const Ticket handle = start(context, in_place(SRT_BROADCAST, "x", data, count, DType::float32));
    if (rank == 1) {
      while (!mpi.calls(1)) std::this_thread::yield();  // its part has begun
      context.shutdown(milliseconds(50));
    } else {
      expect_ok(context.wait(&handle, 1, seconds(30)));
      CHECK_EQUAL(context.poll(handle).code(), SRT_OK);
      const Nanoseconds start = now();
      context.shutdown(seconds(40));
      CHECK(now() - start < seconds(30));
    }
    context.release(&handle, 1);
  });
}

// Ranks 0 and 3 exchange no control frames, and have no socket before this operation.
TEST(a_rank_that_leaves_is_named_where_only_data_needs_a_link) {
  FakeMpi mpi(4);
  World ranks(4, over_mpi(mpi, {0, 0, 1, 1}));
  constexpr int64_t count = 3'000'000;
  mpi.hold(0);
  std::atomic<bool> is_over{false};
  ranks.run([&](int rank, Context& context) {
    if (rank == 1 || rank == 2) return is_over.wait(false);
    std::vector<float> data(count);
    srt_request mail = in_place(SRT_SEND, "mail", data, count, DType::float32);
    mail.root = 3;
    mail.destination = 0;
    const Ticket handle = start(context, mail);
    if (rank == 3) {
      while (!sent_over(context, "mpi")) std::this_thread::yield();
      context.shutdown(milliseconds(50));
    } else {
      const Status status = context.wait(&handle, 1, seconds(30));
      CHECK_EQUAL(status.code(), SRT_PEER_LOST);
      CHECK(std::string(status.text()).find("rank 3 (pid 103 on here)") == 0);
      is_over = true;
      is_over.notify_all();
    }
    context.release(&handle, 1);
  });
}

TEST(control_frames_are_not_taken_from_mpi) {
  FakeMpi mpi(2);
  World ranks(2, over_mpi(mpi, {0, 1}));
  const FrameHeader abort{0, FrameKind::abort, 0, 0};
  const srt_mpi sender = mpi.of(1);
  uint64_t request = 0;
  auto* frame = new uint8_t[sizeof abort];  // the fake library frees it
  std::memcpy(frame, &abort, sizeof abort);
  CHECK_EQUAL(sender.issend(frame, sizeof abort, sender.byte_type, 0, sender.tag, sender.comm, &request), 0);
  ranks.run([&](int rank, Context& context) {
    FloatSum sum("x", 20'000);
    const Status status = end_of(context, sum.request);
    CHECK(!status.is_ok());
    if (rank == 0) CHECK(contains(status, "sent a frame over MPI that is no data"));
  });
}

TEST(an_abort_ends_ranks_that_wait_for_messages) {
  for (const std::vector<int>& hosts : placements) {
    const auto size = static_cast<int>(hosts.size());
    for (int aborter = 0; aborter < size; ++aborter) {
      FakeMpi mpi(size, slow);
      World ranks(size, over_mpi(mpi, hosts, small_chunks));
      std::atomic<int> through{0};
      ranks.run([&](int rank, Context& context) {
        run_well(context, FloatSum("warm", 20'000).request);
        for (++through; through < size;) std::this_thread::yield();
        if (rank == aborter) return context.abort("RuntimeError: loss is NaN");
        mpi.hold(rank);
        FloatSum sum("endless", 20'000);
        CHECK_EQUAL(end_of(context, sum.request).code(), SRT_ABORTED);
        CHECK(std::string(context.death_text()).find(format("rank %d (pid %d on ", aborter, 100 + aborter)) == 0);
      });
    }
  }
}

TEST(a_lost_rank_is_named_by_those_that_wait_for_its_messages) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1}, {0, 1, 2}})
    for (int lost = 1; lost < static_cast<int>(hosts.size()); ++lost) {
      const auto size = static_cast<int>(hosts.size());
      FakeMpi mpi(size);
      Options options = over_mpi(mpi, hosts, small_chunks);
      options.shut_down = false;
      World ranks(size, std::move(options));
      std::atomic<bool> is_lost{false};
      mpi.hold(lost);  // it never ends its part, and so the others wait for it
      ranks.run([&](int rank, Context& context) {
        FloatSum sum("x", 20'000);
        const Ticket handle = start(context, sum.request);
        if (rank == lost) {
          while (!sent_over(context, "mpi")) std::this_thread::yield();
          ranks.lose(lost);
          is_lost = true;
          return;
        }
        const Status status = context.wait(&handle, 1, seconds(60));
        CHECK_EQUAL(status.code(), SRT_PEER_LOST);
        CHECK(std::string(status.text()).find(format("rank %d (pid %d on ", lost, 100 + lost)) == 0);
        while (!is_lost) std::this_thread::yield();
      });
    }
}

TEST(an_error_of_mpi_ends_all_ranks) {
  FakeMpi mpi(3, slow);
  World ranks(3, over_mpi(mpi, {0, 1, 2}, small_chunks));
  ranks.run([&](int rank, Context& context) {
    run_well(context, FloatSum("warm", 20'000).request);
    if (rank == 1) mpi.fail(1);
    Status status;
    for (int i = 0; i < 1000 && status.is_ok(); ++i) {
      FloatSum sum("x", 20'000);
      status = end_of(context, sum.request);
    }
    CHECK_EQUAL(status.code(), SRT_PEER_LOST);
    if (rank == 1) CHECK(contains(status, " returned the error 15"));
  });
}

// The root's own operation has ended, and nothing but its own look at the messages in flight shows the error.
TEST(an_error_of_mpi_behind_an_operation_ends_all_ranks) {
  FakeMpi mpi(2);
  World ranks(2, over_mpi(mpi, {0, 1}));
  constexpr int64_t count = 10;
  mpi.hold(1);
  ranks.run([&](int rank, Context& context) {
    std::vector<float> data(count);
    const Ticket handle = start(context, in_place(SRT_BROADCAST, "x", data, count, DType::float32));
    if (rank == 0) {
      expect_ok(context.wait(&handle, 1, seconds(60)));
      mpi.fail(0);
      while (context.usable().is_ok()) std::this_thread::yield();
    } else {
      CHECK_EQUAL(context.wait(&handle, 1, seconds(60)).code(), SRT_PEER_LOST);
    }
    context.release(&handle, 1);
  });
}

TEST(a_rank_that_leaves_within_an_operation_is_named) {
  for (const bool receives : {true, false}) {  // what rank 0 has sent
    FakeMpi mpi(2);
    World ranks(2, over_mpi(mpi, {0, 1}, {{"chunk_bytes", "4096"}, {"cpu_algorithm", "direct"}}));
    mpi.hold(0);
    mpi.hold(1, !receives);
    ranks.run([&](int rank, Context& context) {
      FloatSum sum("x", 20'000);
      const Ticket handle = start(context, sum.request);
      if (rank == 0) {
        while (!sent_over(context, "mpi")) std::this_thread::yield();
        context.shutdown(milliseconds(50));
      }
      const Status status = context.wait(&handle, 1, seconds(60));
      CHECK_EQUAL(status.code(), rank == 0 ? SRT_SHUT_DOWN : SRT_PEER_LOST);
      if (rank == 1) CHECK(std::string(status.text()).find("rank 0 (pid 100 on here)") == 0);
      context.release(&handle, 1);
    });
  }
}

// Sent bytes wait in the sender's memory: it leaves only when they are received, as late as that may be.
TEST(a_rank_leaves_after_its_messages_are_received) {
  FakeMpi mpi(2);
  World ranks(2, over_mpi(mpi, {0, 1}));
  constexpr int64_t count = 200'000;  // no more than may be in flight: the root's part ends at once
  mpi.hold(1);
  const Nanoseconds begun = now();
  ranks.run([&](int rank, Context& context) {
    std::vector<float> data(count, static_cast<float>(5 - rank));
    const Ticket handle = start(context, in_place(SRT_BROADCAST, "x", data, count, DType::float32));
    if (rank == 0) {
      context.shutdown(seconds(20));
      CHECK(now() - begun >= milliseconds(1500));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than other links are given
      mpi.hold(1, false);
      expect_ok(context.wait(&handle, 1, seconds(60)));
    }
    CHECK(data == std::vector<float>(count, 5));
    context.release(&handle, 1);
  });
}

TEST(after_a_failure_nobody_waits_for_messages_in_flight) {
  FakeMpi mpi(2);
  World ranks(2, over_mpi(mpi, {0, 1}));
  std::atomic<int> sending{0}, failed{0}, ready{0};
  mpi.hold(0);
  mpi.hold(1);
  ranks.run([&](int rank, Context& context) {
    FloatSum sum("x", 2'000'000);
    const Ticket handle = start(context, sum.request);
    while (!sent_over(context, "mpi")) std::this_thread::yield();
    for (++sending; sending < 2;) std::this_thread::yield();
    if (rank == 0) context.abort("RuntimeError: loss is NaN");
    CHECK_EQUAL(context.wait(&handle, 1, seconds(60)).code(), SRT_ABORTED);
    context.release(&handle, 1);
    for (++failed; failed < 2;) std::this_thread::yield();
    const int64_t before = mpi.calls(rank);
    for (++ready; ready < 2;) std::this_thread::yield();
    context.shutdown(seconds(20));
    CHECK_EQUAL(mpi.calls(rank), before);
  });
}

// It has said goodbye over TCP, and the end of that connection is no loss.
TEST(ranks_go_on_after_another_has_left) {
  FakeMpi mpi(3);
  World ranks(3, over_mpi(mpi, {0, 1, 2}));
  std::atomic<bool> has_left{false};
  ranks.run([&](int rank, Context& context) {
    run_well(context, FloatSum("all", 20'000).request);
    const int32_t pair = add_set(context, {0, 1});
    if (rank == 2) {
      context.shutdown(seconds(20));
      has_left = true;
      return;
    }
    while (!has_left) std::this_thread::yield();
    const Nanoseconds until = now() + milliseconds(500);  // a loss is noticed within 200 ms
    for (bool is_over = false; !is_over;) {
      FloatSum sum("pair", 20'000, rank == 0 && now() > until ? 1 : 0);
      sum.request.process_set = pair;
      run_well(context, sum.request);
      is_over = sum.data[0] != 0 || !context.usable().is_ok();
    }
  });
}
