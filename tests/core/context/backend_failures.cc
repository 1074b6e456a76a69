// Backends whose operations fail, or never end.
#include <atomic>
#include <new>

#include "world.h"

using namespace world;

namespace {

using Knobs = std::vector<std::pair<std::string, std::string>>;

enum class Failure { no_memory, never_ends };

// An operation that runs out of memory in the middle of the engine's loop, or waits for a device for ever.
class FailingOperation final : public Operation {
 public:
  FailingOperation(Failure failure, const std::atomic<bool>& is_quiet) : failure_(failure), is_quiet_(is_quiet) {}
  Status advance(Nanoseconds, Progress& progress) override {
    if (failure_ == Failure::no_memory) throw std::bad_alloc();
    progress = Progress::blocked;
    return Status::ok();
  }
  bool is_quiet() const override { return is_quiet_; }
  bool must_be_polled() const override { return true; }

 private:
  const Failure failure_;
  const std::atomic<bool>& is_quiet_;
};

// A backend of failing operations for device 0.
class FailingBackend final : public Backend {
 public:
  FailingBackend(Failure failure, const std::atomic<bool>& is_quiet) : failure_(failure), is_quiet_(is_quiet) {}
  BackendName name(const Transfer&) const override { return BackendName::staged; }
  bool serves(const Transfer& transfer) const override { return transfer.device == 0; }
  std::unique_ptr<Operation> start(TransferPtr) override {
    return std::make_unique<FailingOperation>(failure_, is_quiet_);
  }
  unsigned needs(const Transfer&) const override { return needs_nothing; }

 private:
  const Failure failure_;
  const std::atomic<bool>& is_quiet_;
};

}  // namespace

TEST(a_rank_without_memory_fails_the_job_and_not_its_process) {
  std::atomic<bool> is_quiet{true};
  for (Over transport : {Over::memory, Over::sockets}) {
    World ranks(2, {transport, {}, [&](int rank, Context& context) {
      context.add_backend(
          std::make_unique<FailingBackend>(rank == 1 ? Failure::no_memory : Failure::never_ends, is_quiet));
    }, true});
    ranks.run([&](int, Context& context) {
      FloatSum sum("starved");
      sum.request.device = 0;
      const Status status = end_of(context, sum.request);
      CHECK_EQUAL(status.code(), SRT_OUT_OF_MEMORY);
      CHECK(contains(status, "rank 1 (pid 101 on here) failed: there is no memory left"));
    });
  }
}

TEST(a_progress_deadline_shorter_than_the_stall_report_is_kept) {
  std::atomic<bool> is_quiet{false};
  const Knobs knobs{{"progress_deadline", "0.2"}, {"stall_report", "1000"}, {"log_descriptor", "-1"}};
  World ranks(2, {Over::memory, knobs, [&](int, Context& context) {
    context.add_backend(std::make_unique<FailingBackend>(Failure::never_ends, is_quiet));
  }, true});
  std::atomic<int> over{0};
  ranks.run([&](int, Context& context) {
    FloatSum sum("held");
    sum.request.device = 0;
    const Ticket handle = start(context, sum.request);
    for (const Nanoseconds end = now() + seconds(60); !*context.death_text() && now() < end;)
      std::ignore = context.wait(&handle, 1, milliseconds(20));
    CHECK(contains(context.death_text(), "'held' has not ended on the GPUs"));
    for (++over; over < 2;) std::this_thread::yield();
    is_quiet = true;
    CHECK_EQUAL(context.wait(&handle, 1, seconds(30)).code(), SRT_TIMEOUT);
  });
}
