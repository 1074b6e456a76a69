// Failures at every point of the protocol: links that delay, break, corrupt bytes or fall silent; ranks that abort,
// leave, or never arrive. Each handle ends exactly once, each rank learns the reason, and nobody waits for ever.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "faulty_wire.h"
#include "world.h"

using namespace world;

namespace {

// A faulty link in a world of three ranks over sockets: the fault hits what rank `victim` reads from rank `from`, after
// `after` bytes.
struct Trouble {
  Fault fault;
  size_t after;
  int victim, from;
};

Options with_trouble(const Trouble& trouble, const Wire& wire) {
  // Short only where a deadline has to end the case: on a busy machine any rank may be late.
  const char* deadline = trouble.fault == Fault::cut || trouble.fault == Fault::delay ? "20" : "0.4";
  return {Over::sockets,
          {{"progress_deadline", deadline},
           {"stall_deadline", deadline},
           {"stall_report", "0.2"},
           {"chunk_bytes", "4096"},
           {"log_descriptor", "-1"}},
          nullptr,
          true,
          wire.between(trouble.victim, trouble.from)};
}

struct Ending {
  std::vector<srt_status> codes;
  std::string text;
};

// The operations that the ranks run: a few steps of training, or the other kinds.
enum class Traffic { training, exchanging };

std::vector<srt_request> requests_of(Traffic traffic, int rank, std::vector<float>& data, std::vector<float>& output,
                                     const int64_t& count) {
  const auto with = [&](int32_t kind, const char* name) { return in_place(kind, name, data, count, DType::float32); };
  if (traffic == Traffic::training)
    return {with(SRT_ALLREDUCE, "gradient"), with(SRT_BROADCAST, "weights"),
            world::request(SRT_BARRIER, "barrier", nullptr, 0)};
  srt_request scatter = from_to(with(SRT_REDUCESCATTER, "scatter"), data, output);
  scatter.reduce_op = SRT_MAX;
  srt_request adasum = with(SRT_ALLREDUCE, "adasum"), mail = with(SRT_SEND, "mail");
  adasum.reduce_op = SRT_ADASUM;
  mail.root = rank;
  mail.destination = (rank + 1) % 3;
  srt_request from = from_to(mail, data, output);
  from.root = (rank + 2) % 3;
  from.destination = rank;
  if (rank) std::swap(mail, from);  // 0 to 1, 1 to 2, 2 to 0
  return {scatter, with(SRT_ALLTOALL, "exchange"), mail, from, adasum};
}

// Returns whether the result of an operation that has succeeded is right, by the minimum that must hold.
bool is_right(const srt_request& request, int rank, Context& context, Ticket handle, const std::vector<float>& data,
              const std::vector<float>& output) {
  if (request.kind == SRT_BROADCAST) return data.back() == 0;
  if (request.kind == SRT_REDUCESCATTER) return output[0] == 2;
  if (request.kind == SRT_ALLTOALL) return output_of<float>(context, handle).back() == 2;
  if (request.kind == SRT_SEND) return request.root == rank || output.back() == static_cast<float>(request.root);
  if (request.kind == SRT_ALLREDUCE) return data.back() == (request.reduce_op == SRT_SUM ? 3.0f : 1.5f);
  return true;
}

// Returns how each rank's operations ended.
std::vector<Ending> suffer(const Trouble& trouble, Traffic traffic) {
  Wire wire(trouble.fault, trouble.after);
  World ranks(3, with_trouble(trouble, wire));
  std::vector<Ending> endings(3);
  ranks.run([&](int rank, Context& context) {
    Ending& ending = endings[static_cast<size_t>(rank)];
    const int64_t count = 5001;
    std::vector<float> data(static_cast<size_t>(count)), output(static_cast<size_t>(count));
    for (int step = 0; step < 3; ++step) {
      for (const srt_request& request : requests_of(traffic, rank, data, output, count)) {
        std::fill(data.begin(), data.end(), static_cast<float>(rank));
        Ticket handle = 0;
        Status status = context.enqueue(&request, 1, &handle);
        if (status.is_ok()) status = context.wait(&handle, 1, seconds(30));
        ending.codes.push_back(status.code());
        if (!status.is_ok()) ending.text = status.text();
        if (status.is_ok() && trouble.fault != Fault::corrupt)
          CHECK(is_right(request, rank, context, handle, data, output));
        if (handle) context.release(&handle, 1);
      }
    }
  });
  return endings;
}

const std::vector<size_t> points{0,   1,    15,   16,   17,   40,     100,    200,   300,
                                 500, 1000, 3000, 5000, 8000, 12'000, 20'000, 30'000};
constexpr std::array<int, 2> links[] = {
    {0, 1}, {1, 0}, {1, 2}, {2, 1}};  // to and from the coordinator, and between others

// The links' worlds run at the same time: they wait more than they compute.
void on_each_trouble(Fault fault, const std::vector<size_t>& where,
                     const std::function<void(const std::vector<Ending>&, size_t after)>& look) {
  for (Traffic traffic : {Traffic::training, Traffic::exchanging})
    for (size_t after : where) {
      std::vector<std::future<std::vector<Ending>>> worlds;
      for (const auto& [victim, from] : links)
        worlds.push_back(std::async(std::launch::async, suffer, Trouble{fault, after, victim, from}, traffic));
      for (auto& world : worlds) look(world.get(), after);
    }
}

void expect_fatal(const std::vector<Ending>& endings, const std::set<srt_status>& allowed, const char* what,
                  size_t after) {
  for (const Ending& ending : endings)
    for (srt_status code : ending.codes)
      if (code != SRT_OK && !allowed.contains(code))
        check::fail(__FILE__, __LINE__,
                    format("%s after %zu bytes ended with status %d: %s", what, after, code, ending.text.c_str()));
}

}  // namespace

TEST(a_late_link_changes_nothing) {
  on_each_trouble(Fault::delay, points, [](const std::vector<Ending>& endings, size_t) {
    for (const Ending& ending : endings) {
      CHECK_EQUAL(ending.codes, std::vector<srt_status>(ending.codes.size(), SRT_OK));
      CHECK_EQUAL(ending.text, "");
    }
  });
}

TEST(a_broken_link_ends_every_rank) {
  on_each_trouble(Fault::cut, points, [](const std::vector<Ending>& endings, size_t after) {
    expect_fatal(endings, {SRT_PEER_LOST}, "a cut", after);
    if (after > 1000) return;  // later, the job may have ended before the cut
    for (const Ending& ending : endings) {
      CHECK_EQUAL(ending.codes.back(), SRT_PEER_LOST);
      CHECK(contains(ending.text, " was lost"));
    }
  });
}

TEST(a_lying_link_is_named_and_kills_no_process) {
  on_each_trouble(Fault::corrupt, points, [](const std::vector<Ending>& endings, size_t after) {
    expect_fatal(endings, {SRT_PROTOCOL, SRT_MISMATCH, SRT_TIMEOUT, SRT_PEER_LOST, SRT_ABORTED}, "corruption", after);
  });
}

// The rank that receives the bytes is not blamed, though it notices first. The fourth byte is the highest of a frame's
// length.
TEST(malformed_bytes_are_blamed_on_their_sender) {
  int seen = 0;
  for (const auto& [victim, from] : links)
    for (const Ending& ending : suffer({Fault::corrupt, 3, victim, from}, Traffic::training)) {
      if (!contains(ending.text, "impossible header")) continue;
      CHECK_EQUAL(ending.text,
                  format("rank %d (pid %d on here): a frame with an impossible header arrived", from, 100 + from));
      ++seen;
    }
  CHECK(seen > 0);
}

TEST(a_silent_link_is_given_up) {
  on_each_trouble(Fault::stall, {0, 17, 300, 5000}, [](const std::vector<Ending>& endings, size_t after) {
    expect_fatal(endings, {SRT_TIMEOUT, SRT_PEER_LOST}, "silence", after);
  });
}

TEST(an_abort_reaches_every_rank_with_its_reason) {
  for (Over transport : {Over::memory, Over::sockets}) {
    World ranks(3, {transport, {}, nullptr, true});
    std::atomic<int> through{0};
    ranks.run([&](int rank, Context& context) {
      FloatSum sum("x", 100);
      Ticket handle = 0;
      expect_ok(run_one(context, sum.request, handle));
      for (++through; through < 3;) std::this_thread::yield();
      if (rank == 2) {
        context.abort("RuntimeError: loss is NaN");
      } else {
        const Status status = run_one(context, sum.request, handle);
        CHECK_EQUAL(status.code(), SRT_ABORTED);
        CHECK_EQUAL(std::string(status.text()), "rank 2 (pid 102 on here) gave up: RuntimeError: loss is NaN");
        if (handle) CHECK_EQUAL(std::string(context.error(handle)), "'x': " + std::string(status.text()));
      }
      CHECK_EQUAL(context.enqueue(&sum.request, 1, &handle).code(), SRT_ABORTED);
      CHECK_EQUAL(std::string(context.death_text()), "rank 2 (pid 102 on here) gave up: RuntimeError: loss is NaN");
    });
  }
}

TEST(a_rank_that_has_finished_is_named_when_it_is_needed) {
  for (Over transport : {Over::memory, Over::sockets})
    for (int leaver : {0, 1, 2}) {
      World ranks(3, {transport, {}, nullptr, true});
      std::atomic<int> done{0};
      ranks.run([&](int rank, Context& context) {
        FloatSum sum("x");
        run_well(context, sum.request);
        if (rank == leaver) return;
        for (int again = 0; again < 2; ++again) {
          const Status status = end_of(context, sum.request);
          CHECK_EQUAL(status.code(), SRT_PEER_FINISHED);
          CHECK(contains(status,
                         format("rank %d (pid %d on here) has finished and cannot take part", leaver, 100 + leaver)));
        }
        for (++done; done < 2;) std::this_thread::yield();
      });
    }
}

TEST(a_rank_that_never_submits_is_given_up_by_name) {
  for (Over transport : {Over::memory, Over::sockets}) {
    World ranks(
        3, {transport, {{"stall_report", "0.1"}, {"stall_deadline", "0.5"}, {"log_descriptor", "-1"}}, nullptr, true});
    std::atomic<int> done{0};
    ranks.run([&](int rank, Context& context) {
      FloatSum sum("grad.w");
      if (rank != 1) {
        const Status status = end_of(context, sum.request);
        CHECK_EQUAL(status.code(), SRT_TIMEOUT);
        CHECK(contains(status, "rank 1 (pid 101 on here)"));
        CHECK(contains(status, "grad.w"));
        CHECK_EQUAL(context.death().origin, 1);
      }
      for (++done; done < 3;) std::this_thread::yield();
    });
  }
}

// Handles of finished operations are reused, so the order of handles means nothing. The ranks wait for each other,
// which ends the job at the second report.
TEST(a_stall_report_names_what_a_rank_has_submitted_first) {
  const Descriptor file(::memfd_create("log", MFD_CLOEXEC));
  const auto logged = [&] {
    std::string text(1 << 16, ' ');
    text.resize(static_cast<size_t>(std::max<ssize_t>(::pread(file.get(), text.data(), text.size(), 0), 0)));
    return text;
  };
  World ranks(2, {Over::memory,
                  {{"stall_report", "0.1"}, {"stall_deadline", "0"}, {"log_descriptor", std::to_string(file.get())}},
                  nullptr,
                  true});
  ranks.run([&](int rank, Context& context) {
    const int64_t count = 4;
    std::vector<float> data[3] = {std::vector<float>(4), std::vector<float>(4), std::vector<float>(4)};
    const auto enqueue = [&](const char* name, size_t place) {
      const srt_request request = in_place(SRT_ALLREDUCE, name, data[place], count, DType::float32);
      const Ticket handle = start(context, request);
      return handle;
    };
    const Ticket common = enqueue("common", 0);
    const Ticket own = enqueue(rank ? "second" : "other", 1);
    CHECK_EQUAL(context.wait(&common, 1, seconds(30)).code(), SRT_OK);
    context.release(&common, 1);
    if (rank) enqueue("third", 2);
    const Nanoseconds end = now() + seconds(30);
    while (!contains(logged(), "it waits for 'second'") && now() < end) {
      const srt_status code = context.wait(&own, 1, milliseconds(20)).code();
      CHECK(code == SRT_IN_PROGRESS || code == SRT_TIMEOUT);
    }
  });
  CHECK(contains(logged(), "it waits for 'second'"));
  CHECK(!contains(logged(), "it waits for 'third'"));
}

TEST(any_thread_may_ask_why_a_context_is_dead) {
  World ranks(1, {Over::memory, {}, nullptr, true});
  ranks.run([](int, Context& context) {
    context.abort("enough");
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { CHECK(contains(context.death_text(), "enough")); });
    for (std::thread& thread : threads) thread.join();
  });
}

// Rank 1 receives the refusal last, after the aborts of the ranks that gave up because of it.
TEST(an_abort_does_not_overtake_the_decision_that_led_to_it) {
  for (size_t after : points) {
    Wire wire(Fault::delay, after);
    World ranks(3, with_trouble({Fault::delay, after, 1, 0}, wire));
    std::vector<srt_status> codes(3);
    std::atomic<int> done{0};
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 10 + rank;
      std::vector<float> data(12);
      codes[static_cast<size_t>(rank)] =
          end_of(context, in_place(SRT_ALLREDUCE, "loss", data, count, DType::float32)).code();
      if (rank == 2) context.abort("MismatchError");
      if (rank == 0) {
        const Status next = end_of(context, in_place(SRT_ALLREDUCE, "next", data, count, DType::float32));
        CHECK_EQUAL(next.code(), SRT_ABORTED);
        CHECK_EQUAL(context.death().origin, 2);
      }
      for (++done; done < 3;) std::this_thread::yield();
    });
    CHECK_EQUAL(codes, std::vector<srt_status>(3, SRT_MISMATCH));
  }
}

TEST(handles_end_once_whatever_threads_do) {
  World ranks(2, {Over::memory, {}, nullptr, true});
  ranks.run([&](int rank, Context& context) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        const int64_t count = 1000;
        std::vector<float> data(1000);
        const std::string name = "thread." + std::to_string(t);
        for (int i = 0; i < 200; ++i) {
          std::fill(data.begin(), data.end(), static_cast<float>(rank + i));
          srt_request request = in_place(SRT_ALLREDUCE, name.c_str(), data, count, DType::float32);
          const Ticket handle = start(context, request);
          if (i % 3 == 0)
            while (context.poll(handle).code() == SRT_IN_PROGRESS) std::this_thread::yield();
          expect_ok(context.wait(&handle, 1, seconds(30)));
          CHECK_EQUAL(data[999], static_cast<float>(2 * i + 1));
          context.release(&handle, 1);
          CHECK_EQUAL(context.poll(handle).code(), SRT_INVALID_ARGUMENT);
        }
      });
    for (auto& thread : threads) thread.join();
  });
}
