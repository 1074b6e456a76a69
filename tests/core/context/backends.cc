// A backend that finishes plans later and from another thread, as a GPU does, and native completion hooks, as
// TensorFlow's and XLA's asynchronous kernels need them.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <random>

#include "world.h"

using namespace world;

namespace {

// The meeting point of all ranks' operations, by plan number; its own thread sums them, out of order and late.
class Device {
 public:
  explicit Device(size_t ranks) : ranks_(ranks), worker_([this] { work(); }) {}
  ~Device() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    worker_.join();
  }

  struct Job {
    std::vector<TransferPtr> transfers;
    bool finished = false;
    bool cancelled = false;
  };

  std::shared_ptr<Job> submit(TransferPtr transfer) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Job>& job = jobs_[transfer->plan];
    if (!job) job = std::make_shared<Job>();
    job->transfers.push_back(std::move(transfer));
    if (job->transfers.size() == ranks_) ready_.push_back(job);
    wake_.notify_all();
    return job;
  }

  bool is_finished(const Job& job) {
    const std::lock_guard lock(mutex_);
    return job.finished;
  }

  void cancel(Job& job) {
    const std::lock_guard lock(mutex_);
    job.cancelled = true;
  }

  // Sets whether the device holds back its jobs; none finishes while it does.
  void hold_back(bool on) {
    const std::lock_guard lock(mutex_);
    holds_back_ = on;
    wake_.notify_all();
  }

 private:
  void work() {
    std::mt19937 random(7);
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || (!ready_.empty() && !holds_back_); });
      if (stopping_) return;
      const size_t pick = random() % ready_.size();
      const std::shared_ptr<Job> job = ready_[pick];
      ready_.erase(ready_.begin() + static_cast<ptrdiff_t>(pick));
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      lock.lock();
      if (!job->cancelled) sum(*job);
      job->finished = true;
    }
  }

  static void sum(const Job& job) {
    const auto count = static_cast<size_t>(job.transfers.front()->buffer.bytes()) / sizeof(float);
    std::vector<float> total(count);
    for (const auto& transfer : job.transfers)
      transfer->buffer.visit(0, transfer->buffer.bytes(),
                             [&](const uint8_t* in, uint8_t*, int64_t offset, int64_t bytes) {
        for (int64_t i = 0; i < bytes / 4; ++i)
          total[static_cast<size_t>(offset / 4 + i)] += reinterpret_cast<const float*>(in)[i];
      });
    for (const auto& transfer : job.transfers)
      transfer->buffer.visit(0, transfer->buffer.bytes(),
                             [&](const uint8_t*, uint8_t* out, int64_t offset, int64_t bytes) {
        std::copy_n(total.data() + offset / 4, bytes / 4, reinterpret_cast<float*>(out));
      });
  }

  const size_t ranks_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::unordered_map<uint64_t, std::shared_ptr<Job>> jobs_;
  std::vector<std::shared_ptr<Job>> ready_;
  bool stopping_ = false, holds_back_ = false;
  std::thread worker_;
};

class DeviceOperation final : public Operation {
 public:
  DeviceOperation(Device& device, TransferPtr transfer) : device_(device), job_(device.submit(std::move(transfer))) {}
  Status advance(Nanoseconds, Progress& progress) override {
    progress = device_.is_finished(*job_) ? Progress::done : Progress::blocked;
    return Status::ok();
  }
  void cancel() override { device_.cancel(*job_); }
  bool is_quiet() const override { return device_.is_finished(*job_); }
  bool must_be_polled() const override { return true; }

 private:
  Device& device_;
  std::shared_ptr<Device::Job> job_;
};

// A backend that serves device 0, with many operations side by side.
class DeviceBackend final : public Backend {
 public:
  explicit DeviceBackend(Device& device) : device_(device) {}
  BackendName name(const Transfer&) const override { return BackendName::staged; }
  bool serves(const Transfer& transfer) const override { return transfer.device == 0; }
  std::unique_ptr<Operation> start(TransferPtr transfer) override {
    return std::make_unique<DeviceOperation>(device_, std::move(transfer));
  }
  unsigned needs(const Transfer&) const override { return needs_nothing; }

 private:
  Device& device_;
};

Options on_device(Device& device, Over transport) {
  return {transport, {}, [&device](int, Context& context) {
    context.add_backend(std::make_unique<DeviceBackend>(device));
  }, true};
}

struct Hook {
  std::atomic<int> calls{0};
  std::atomic<srt_status> status{-1};
  std::thread::id caller, thread;
  std::vector<uint8_t> memory;

  static void complete(void* user, srt_status status, const char*) {
    auto& hook = *static_cast<Hook*>(user);
    hook.thread = std::this_thread::get_id();
    hook.status = status;
    ++hook.calls;
  }
  static uintptr_t allocate(void* user, const srt_tensor* output) {
    auto& memory = static_cast<Hook*>(user)->memory;
    memory.resize(output->bytes + 1);
    return reinterpret_cast<uintptr_t>(memory.data());
  }
  bool wait_for(int count) const {
    for (const Nanoseconds end = now() + seconds(30); now() < end;)
      if (calls >= count) return true;
      else std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return false;
  }
};

}  // namespace

TEST(plans_that_finish_later_and_out_of_order) {
  for (Over transport : {Over::memory, Over::sockets}) {
    constexpr int size = 3, rounds = 60;
    Device device(size);
    World ranks(size, on_device(device, transport));
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 50;
      std::vector<std::vector<float>> data(rounds);
      std::vector<Ticket> handles(rounds);
      for (int i = 0; i < rounds; ++i) {
        data[static_cast<size_t>(i)].assign(static_cast<size_t>(count), static_cast<float>(rank + i));
        const std::string name = "t" + std::to_string(i);
        srt_request request =
            in_place(SRT_ALLREDUCE, name.c_str(), data[static_cast<size_t>(i)], count, DType::float32);
        request.device = i % 3 ? 0 : -1;  // the CPU's own plans proceed meanwhile
        CHECK_EQUAL(context.enqueue(&request, 1, &handles[static_cast<size_t>(i)]).code(), SRT_OK);
        if (i % 7 == 0) context.flush();
      }
      expect_ok(context.wait(handles.data(), rounds, seconds(60)));
      for (int i = 0; i < rounds; ++i)
        for (float value : data[static_cast<size_t>(i)]) CHECK_EQUAL(value, static_cast<float>(size * i + 3));
    });
  }
}

TEST(an_abort_ends_no_handle_while_the_device_has_its_memory) {
  Device device(2);
  device.hold_back(true);
  World ranks(2, on_device(device, Over::memory));
  std::atomic<int> started{0}, looked{0};
  ranks.run([&](int rank, Context& context) {
    FloatSum sum("held");
    sum.request.device = 0;
    const Ticket handle = start(context, sum.request);
    CHECK_EQUAL(context.wait(&handle, 1, milliseconds(100)).code(), SRT_IN_PROGRESS);
    for (++started; started < 2;) std::this_thread::yield();
    std::thread aborter;
    if (rank == 1) aborter = std::thread([&] { context.abort("ValueError: enough"); });
    CHECK_EQUAL(context.wait(&handle, 1, milliseconds(300)).code(), SRT_IN_PROGRESS);
    for (++looked; looked < 2;) std::this_thread::yield();
    device.hold_back(false);
    const Status status = context.wait(&handle, 1, seconds(30));
    CHECK_EQUAL(status.code(), SRT_ABORTED);
    CHECK(contains(status, "rank 1 (pid 101 on here) gave up: ValueError: enough"));
    if (aborter.joinable()) aborter.join();
  });
}

TEST(hooks_are_called_once_from_the_engines_thread) {
  for (int size : {1, 2, 3}) {
    World ranks(size, {});
    ranks.run([&](int rank, Context& context) {
      constexpr int operations = 200;
      const int64_t count = 9;
      std::vector<std::vector<float>> data(operations,
                                           std::vector<float>(static_cast<size_t>(count), static_cast<float>(rank)));
      Hook hook;
      for (int i = 0; i < operations; ++i) {
        // The same name is in flight twice, as in a compiled loop: the second operation waits its turn.
        srt_request request =
            in_place(SRT_ALLREDUCE, i % 2 ? "loop.a" : "loop.b", data[static_cast<size_t>(i)], count, DType::float32);
        request.flags = SRT_REQUEST_QUEUE_SAME_NAME;
        request.on_complete = Hook::complete;
        request.user = &hook;
        const Ticket handle = start(context, request);
        context.release(&handle, 1);  // nobody will poll it
      }
      CHECK(hook.wait_for(operations));
      CHECK_EQUAL(hook.calls.load(), operations);
      CHECK_EQUAL(hook.status.load(), SRT_OK);
      CHECK(hook.thread != std::this_thread::get_id());
      for (const auto& values : data) CHECK_EQUAL(values[8], static_cast<float>(size * (size - 1) / 2));
    });
  }
}

TEST(what_ends_at_once_calls_no_hook_and_what_does_not_calls_one) {
  constexpr int least = 300, most = 20'000;
  for (int size : {1, 2, 3}) {
    World ranks(size, {});
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 5;
      Hook hook;
      int operations = 0, at_once = 0;
      // A lone rank ends an operation at once while its engine sleeps, which may take a while on a busy machine.
      for (int i = 0; i < least || (size == 1 && at_once == 0 && i < most); ++i, ++operations) {
        if (i >= least) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::vector<float> data(static_cast<size_t>(count), static_cast<float>(rank + i));
        srt_request request = in_place(SRT_ALLREDUCE, "loop", data, count, DType::float32);
        request.on_complete = Hook::complete;
        request.user = &hook;
        if (rank && i % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // too late
        Ticket handle;
        bool has_ended = false;
        CHECK_EQUAL(context.enqueue_or_complete(&request, 1, &handle, has_ended).code(), SRT_OK);
        if (has_ended) CHECK_EQUAL(context.poll(handle).code(), SRT_OK);
        else CHECK(hook.wait_for(i + 1 - at_once));
        at_once += has_ended;
        CHECK_EQUAL(data[4], static_cast<float>(size * i + size * (size - 1) / 2));
        context.release(&handle, 1);
      }
      CHECK_EQUAL(hook.calls.load() + at_once, operations);
      if (size == 1) CHECK(at_once > 0);
      if (size > 1 && rank == 0) CHECK(hook.calls.load() > 0);
    });
  }
}

TEST(a_refused_batch_leaves_nothing_behind_an_attempt) {
  World ranks(1, {});
  ranks.run([&](int, Context& context) {
    const int64_t count = 3;
    std::vector<float> data(3, 1);
    Hook hook;
    srt_request requests[2];
    for (srt_request& request : requests) {
      request = in_place(SRT_ALLREDUCE, "same memory", data, count, DType::float32);
      request.on_complete = Hook::complete;
      request.user = &hook;
    }
    Ticket handles[2];
    bool have_ended = false;
    CHECK_EQUAL(context.enqueue_or_complete(requests, 2, handles, have_ended).code(), SRT_INVALID_ARGUMENT);
    CHECK(!have_ended);
    CHECK_EQUAL(context.enqueue_or_complete(requests, 1, handles, have_ended).code(), SRT_OK);
    if (!have_ended) CHECK(hook.wait_for(1));
    context.release(handles, 1);
    CHECK_EQUAL(hook.calls.load(), have_ended ? 0 : 1);
  });
}

// A waiting caller drives the engine; the engine's thread, which calls hooks, must not sleep until the caller is done.
TEST(hooks_are_called_while_a_caller_waits_for_something_else) {
  constexpr int rounds = 10;
  World ranks(2, {});
  std::atomic<int> called{0};
  const Nanoseconds start = now();
  ranks.run([&](int rank, Context& context) {
    Hook hook;
    const int64_t count = 4;
    std::vector<float> early(4), late(4);
    srt_request request = in_place(SRT_ALLREDUCE, "early", early, count, DType::float32);
    request.on_complete = Hook::complete;
    request.user = &hook;
    const srt_request awaited = in_place(SRT_ALLREDUCE, "late", late, count, DType::float32);
    std::thread watcher;
    if (rank == 0)
      watcher = std::thread([&] {
        for (; called < rounds; ++called)
          if (!hook.wait_for(called + 1)) return;
      });
    for (int round = 0; round < rounds; ++round) {
      Ticket handles[2];
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(10));  // rank 0 waits, and drives
      CHECK_EQUAL(context.enqueue(&request, 1, &handles[0]).code(), SRT_OK);
      for (int i = 0; rank == 1 && i < 3000 && called <= round; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK_EQUAL(context.enqueue(&awaited, 1, &handles[1]).code(), SRT_OK);
      CHECK_EQUAL(context.wait(handles, 2, seconds(30)).code(), SRT_OK);
      context.release(handles, 2);
    }
    if (rank == 0) watcher.join();
    CHECK(hook.wait_for(rounds));
  });
  CHECK_EQUAL(called.load(), rounds);
  CHECK(now() - start < seconds(5));  // it takes some tenths of a second; a thread that sleeps on makes it ten seconds
}

TEST(a_hook_brings_the_memory_of_a_ragged_output) {
  World ranks(3, {});
  ranks.run([&](int rank, Context& context) {
    const int64_t shape[] = {rank + 1, 2};
    std::vector<int32_t> part(static_cast<size_t>(2 * rank + 2), rank);
    Hook hook;
    srt_request request = world::request(SRT_ALLGATHER, "ragged", shape, 2, DType::int32);
    request.input = reinterpret_cast<uintptr_t>(part.data());
    request.on_complete = Hook::complete;
    request.allocate = Hook::allocate;
    request.user = &hook;
    const Ticket handle = start(context, request);
    CHECK(hook.wait_for(1));
    CHECK_EQUAL(hook.memory.size(), size_t{6 * 2 * 4 + 1});
    CHECK_EQUAL(reinterpret_cast<const int32_t*>(hook.memory.data())[11], 2);
    context.release(&handle, 1);
  });
}

TEST(a_hook_hears_of_a_failure_once) {
  World ranks(2, {});
  std::atomic<int> queued{0};
  ranks.run([&](int rank, Context& context) {
    Hook hook;
    const int64_t count = 4;
    std::vector<float> data(4);
    srt_request request = in_place(SRT_ALLREDUCE, rank ? "one" : "other", data, count, DType::float32);
    request.on_complete = Hook::complete;
    request.user = &hook;
    start(context, request);
    for (++queued; queued < 2;) std::this_thread::yield();
    if (rank) context.abort("stop");
    CHECK(hook.wait_for(1));
    CHECK_EQUAL(hook.status.load(), SRT_ABORTED);
    context.shutdown(seconds(5));
    CHECK_EQUAL(hook.calls.load(), 1);
  });
}

TEST(the_process_context_is_kept_for_as_long_as_it_is_held) {
  CHECK(srt_acquire_process_context() == nullptr);
  int anything = 0;  // it is passed on, never read
  auto* const context = reinterpret_cast<srt_context*>(&anything);
  srt_set_process_context(context);
  CHECK(srt_acquire_process_context() == context);
  std::atomic<bool> taken_back{false};
  std::thread owner([&] {
    srt_set_process_context(nullptr);
    taken_back = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!taken_back);
  srt_release_process_context();
  owner.join();
  CHECK(taken_back);
  CHECK(srt_acquire_process_context() == nullptr);
}
