// What goes wrong, at every point of the protocol: links that delay, break, lie or fall silent; ranks that give up,
// leave, or never come. Each handle ends exactly once, each rank learns why, and nobody waits for ever.
#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <set>

#include "world.h"

using namespace world;

namespace {

enum class Fault { delay, cut, corrupt, stall };

// A wire between two sockets that misbehaves in one direction, after so many bytes.
class Wire {
 public:
  Wire(Fault fault, size_t after) : fault_(fault), left_(after) {
    CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, near_), 0);
    CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, far_), 0);
    threads_.emplace_back([this] { carry(far_[0], near_[0], true); });
    threads_.emplace_back([this] { carry(near_[0], far_[0], false); });
  }
  ~Wire() {
    cut();
    for (auto& thread : threads_) thread.join();
    ::close(near_[0]);
    ::close(far_[0]);
  }
  int victims_end() const { return near_[1]; }
  int other_end() const { return far_[1]; }

 private:
  void cut() const {
    ::shutdown(near_[0], SHUT_RDWR);
    ::shutdown(far_[0], SHUT_RDWR);
  }

  void carry(int from, int to, bool is_faulty) {
    std::vector<uint8_t> bytes(65536);
    for (;;) {
      const size_t most = is_faulty && left_ ? std::min(left_, bytes.size()) : bytes.size();
      const ssize_t count = ::recv(from, bytes.data(), most, 0);
      if (count <= 0) break;
      if (is_faulty && left_ == 0) {
        if (fault_ == Fault::stall) continue;  // swallowed
        if (fault_ == Fault::cut) break;
        if (fault_ == Fault::corrupt) bytes[0] ^= 0xff;
        if (fault_ == Fault::delay) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        left_ = SIZE_MAX;
      } else if (is_faulty) {
        left_ -= static_cast<size_t>(count);
      }
      for (ssize_t sent = 0; sent < count;) {
        const ssize_t n = ::send(to, bytes.data() + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL);
        if (n < 0) return cut();
        sent += n;
      }
    }
    // An end is passed on as an end, a cut breaks both ways.
    if (is_faulty && left_ == 0 && fault_ == Fault::cut) cut();
    else ::shutdown(to, SHUT_WR);
  }

  Fault fault_;
  size_t left_;
  int near_[2], far_[2];
  std::vector<std::thread> threads_;
};

// Three ranks over sockets; what rank `victim` reads from rank `from` goes wrong after some bytes.
struct Trouble {
  Fault fault;
  size_t after;
  int victim, from;
};

Options with_trouble(const Trouble& trouble, Wire& wire) {
  Options options{Over::sockets,
                  {{"progress_deadline", "0.4"},
                   {"stall_deadline", "0.4"},
                   {"stall_report", "0.2"},
                   {"chunk_bytes", "4096"},
                   {"log_descriptor", "-1"}},
                  nullptr,
                  true};
  options.connect = [&wire, trouble](int a, int b, int* ends) {
    if (std::minmax(a, b) != std::minmax(trouble.victim, trouble.from))
      return ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
    ends[0] = a == trouble.victim ? wire.victims_end() : wire.other_end();
    ends[1] = b == trouble.victim ? wire.victims_end() : wire.other_end();
    return true;
  };
  return options;
}

struct Ending {
  std::vector<srt_status> codes;
  std::string text;
};

// A few steps of training's traffic. What each rank's operations ended with.
std::vector<Ending> suffer(const Trouble& trouble) {
  Wire wire(trouble.fault, trouble.after);
  World ranks(3, with_trouble(trouble, wire));
  std::vector<Ending> endings(3);
  ranks.run([&](int rank, Context& context) {
    Ending& ending = endings[static_cast<size_t>(rank)];
    const int64_t count = 5000;
    std::vector<float> data(static_cast<size_t>(count));
    for (int step = 0; step < 3; ++step) {
      for (int kind : {SRT_ALLREDUCE, SRT_BROADCAST, SRT_BARRIER}) {
        std::fill(data.begin(), data.end(), static_cast<float>(rank));
        srt_request request = in_place(kind,
                                       kind == SRT_ALLREDUCE   ? "gradient"
                                       : kind == SRT_BROADCAST ? "weights"
                                                               : "barrier",
                                       data, count, DType::float32);
        if (kind == SRT_BARRIER) request = world::request(SRT_BARRIER, "barrier", nullptr, 0);
        Ticket handle = 0;
        Status status = context.enqueue(&request, 1, &handle);
        if (status.is_ok()) status = context.wait(&handle, 1, seconds(30));
        ending.codes.push_back(status.code());
        if (!status.is_ok()) ending.text = status.text();
        if (handle) context.release(&handle, 1);
        if (status.is_ok() && kind == SRT_ALLREDUCE) CHECK_EQUAL(data[4999], 3.0f);
      }
    }
  });
  return endings;
}

constexpr size_t points[] = {0, 1, 15, 16, 17, 40, 100, 200, 300, 500, 1000, 3000, 5000, 8000, 12'000, 20'000, 30'000};
constexpr std::array<int, 2> links[] = {
    {0, 1}, {1, 0}, {1, 2}, {2, 1}};  // to and from the coordinator, and between others

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
  for (const auto& [victim, from] : links)
    for (size_t after : points)
      for (const Ending& ending : suffer({Fault::delay, after, victim, from})) {
        CHECK_EQUAL(ending.codes, std::vector<srt_status>(9, SRT_OK));
        CHECK_EQUAL(ending.text, "");
      }
}

TEST(a_broken_link_ends_every_rank) {
  for (const auto& [victim, from] : links)
    for (size_t after : points) {
      const auto endings = suffer({Fault::cut, after, victim, from});
      expect_fatal(endings, {SRT_PEER_LOST}, "a cut", after);
      if (after > 1000) continue;  // later, the job may have ended before
      for (const Ending& ending : endings) {
        CHECK_EQUAL(ending.codes.back(), SRT_PEER_LOST);
        CHECK(ending.text.find(" was lost") != std::string::npos);
      }
    }
}

TEST(a_lying_link_is_named_and_kills_no_process) {
  for (const auto& [victim, from] : links)
    for (size_t after : points)
      expect_fatal(suffer({Fault::corrupt, after, victim, from}),
                   {SRT_PROTOCOL, SRT_MISMATCH, SRT_TIMEOUT, SRT_PEER_LOST, SRT_ABORTED}, "corruption", after);
}

TEST(a_silent_link_is_given_up) {
  for (const auto& [victim, from] : links)
    for (size_t after : {size_t{0}, size_t{17}, size_t{300}, size_t{5000}}) {
      const auto endings = suffer({Fault::stall, after, victim, from});
      expect_fatal(endings, {SRT_TIMEOUT, SRT_PEER_LOST}, "silence", after);
    }
}

TEST(an_abort_reaches_every_rank_with_its_reason) {
  for (Over transport : {Over::memory, Over::sockets}) {
    World ranks(3, {transport, {}, nullptr, true});
    std::atomic<int> through{0};
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 100;
      std::vector<float> data(100);
      srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, DType::float32);
      Ticket handle = 0;
      CHECK_EQUAL(run_one(context, request, handle).code(), SRT_OK);
      for (++through; through < 3;) std::this_thread::yield();
      if (rank == 2) {
        context.abort("RuntimeError: loss is NaN");
      } else {
        const Status status = run_one(context, request, handle);
        CHECK_EQUAL(status.code(), SRT_ABORTED);
        CHECK_EQUAL(std::string(status.text()), "rank 2 (pid 102 on here) gave up: RuntimeError: loss is NaN");
        if (handle) CHECK_EQUAL(std::string(context.error(handle)), "'x': " + std::string(status.text()));
      }
      CHECK_EQUAL(context.enqueue(&request, 1, &handle).code(), SRT_ABORTED);
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
        const int64_t count = 10;
        std::vector<float> data(10);
        Ticket handle = 0;
        srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, DType::float32);
        CHECK_EQUAL(run_one(context, request, handle).code(), SRT_OK);
        if (rank == leaver) return;
        for (int again = 0; again < 2; ++again) {
          const Status status = run_one(context, request, handle);
          CHECK_EQUAL(status.code(), SRT_PEER_FINISHED);
          CHECK(std::string(status.text())
                    .find(format("rank %d (pid %d on here) has finished and cannot take part", leaver, 100 + leaver)) !=
                std::string::npos);
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
      const int64_t count = 10;
      std::vector<float> data(10);
      Ticket handle = 0;
      srt_request request = in_place(SRT_ALLREDUCE, "grad.w", data, count, DType::float32);
      if (rank != 1) {
        const Status status = run_one(context, request, handle);
        CHECK_EQUAL(status.code(), SRT_TIMEOUT);
        CHECK(std::string(status.text()).find("rank 1 (pid 101 on here)") != std::string::npos);
        CHECK(std::string(status.text()).find("grad.w") != std::string::npos);
      }
      for (++done; done < 3;) std::this_thread::yield();
    });
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
          Ticket handle = 0;
          CHECK_EQUAL(context.enqueue(&request, 1, &handle).code(), SRT_OK);
          if (i % 3 == 0)
            while (context.poll(handle).code() == SRT_IN_PROGRESS) std::this_thread::yield();
          CHECK_EQUAL(std::string(context.wait(&handle, 1, seconds(30)).text()), "");
          CHECK_EQUAL(data[999], static_cast<float>(2 * i + 1));
          context.release(&handle, 1);
          CHECK_EQUAL(context.poll(handle).code(), SRT_INVALID_ARGUMENT);
        }
      });
    for (auto& thread : threads) thread.join();
  });
}

CHECK_MAIN()
