// Tests of the fakes in tests/fake_gpu: they do what CUDA and NCCL promise, and no more.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "check.h"
#include "data/kernels/half.h"
#include "fake_gpu/control.h"
#include "gpu/libraries.h"

using namespace sirtaki;

namespace {

constexpr NcclResult invalid_argument = 4, invalid_usage = 5;
constexpr int float32 = 7, sum = 0;

// The fakes, as the core opens them. At the end there must be no misuse, and no objects left.
struct Fakes {
  Fakes() : control(SIRTAKI_FAKE_GPU), libraries(config()) { control.reset(); }
  ~Fakes() {
    CHECK_EQUAL(std::string(control.misuse()), "");
    CHECK_EQUAL(control.alive(), 0);
  }

  static Config config() {
    Config made;
    std::ignore = made.set("gpu_libraries", SIRTAKI_FAKE_GPU);
    return made;
  }

  // Returns the misuse so far, and clears it.
  std::string take_misuse() {
    const std::string text = control.misuse();
    control.reset();
    return text;
  }

  const CudaFunctions& cuda() const { return libraries.cuda(); }
  const NcclFunctions& nccl() const { return libraries.nccl(); }

  FakeGpu control;
  GpuLibraries libraries;
};

void check_ok(int result, int line) {
  if (result != 0) check::fail(__FILE__, line, "result " + std::to_string(result));
}
#define OK(result) check_ok((result), __LINE__)

// The context of a GPU, current in this thread, with a stream of its own.
struct Gpu {
  Gpu(Fakes& fakes, int device) : cuda(fakes.cuda()), device(device) {
    OK(cuda.context_retain(&context, device));
    OK(cuda.context_push(context));
    OK(cuda.stream_create(&stream, cuda_stream_non_blocking, 0));
  }
  ~Gpu() {
    wait(record());
    OK(cuda.stream_destroy(stream));
    OK(cuda.context_pop(nullptr));
    OK(cuda.context_release(device));
  }

  CudaEvent record() const {
    CudaEvent event = nullptr;
    OK(cuda.event_create(&event, cuda_event_disable_timing));
    OK(cuda.event_record(event, stream));
    return event;
  }
  void wait(CudaEvent event) const {
    while (cuda.event_query(event) == cuda_not_ready) std::this_thread::yield();
    OK(cuda.event_query(event));
    OK(cuda.event_destroy(event));
  }

  const CudaFunctions& cuda;
  int device;
  CudaContext context = nullptr;
  CudaStream stream = nullptr;
};

// Device memory for elements.
template <typename T>
struct DeviceArray {
  DeviceArray(const Gpu& gpu, const std::vector<T>& values) : cuda(gpu.cuda), values(values.size()) {
    OK(cuda.memory_allocate(&memory, values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), data());
  }
  ~DeviceArray() { OK(cuda.memory_free(memory)); }
  T* data() const { return reinterpret_cast<T*>(memory); }
  std::vector<T> get() const { return {data(), data() + values}; }

  const CudaFunctions& cuda;
  size_t values;
  CudaMemory memory = 0;
};

// One rank of a communicator, which is created and destroyed as NCCL requires.
struct Communicator {
  Communicator(Fakes& fakes, int size, const NcclUniqueId& id, int rank) : nccl(fakes.nccl()) {
    NcclConfig config;
    CHECK_EQUAL(nccl.init(&handle, size, id, rank, &config), nccl_in_progress);
    state = settle();
  }
  ~Communicator() {
    if (state != nccl_success) abort();
    if (!handle) return;
    nccl.finalize(handle);
    OK(settle());
    OK(nccl.destroy(handle));
  }

  void abort() {
    OK(nccl.abort(handle));
    handle = nullptr;
  }

  NcclResult settle() const {
    NcclResult now = nccl_in_progress;
    while (nccl.async_error(handle, &now) == nccl_success && now == nccl_in_progress) std::this_thread::yield();
    return now;
  }

  const NcclFunctions& nccl;
  NcclCommunicator handle = nullptr;
  NcclResult state = nccl_in_progress;
};

using Body = std::function<void(int rank, Gpu&, Communicator&)>;

// Runs ranks as threads, each with a GPU of its own.
void run_ranks(Fakes& fakes, int size, const Body& body) {
  NcclUniqueId id;
  OK(fakes.nccl().unique_id(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      Gpu gpu(fakes, rank);
      Communicator communicator(fakes, size, id, rank);
      CHECK_EQUAL(communicator.state, nccl_success);
      body(rank, gpu, communicator);
    });
  for (auto& thread : threads) thread.join();
}

// Waits until the launched calls are in the stream, and then until the stream has completed them.
void finish(const Gpu& gpu, const Communicator& communicator) {
  OK(communicator.settle());
  gpu.wait(gpu.record());
}

}  // namespace

// This case runs first: a process with threads should not be forked.
TEST(ranks_may_be_processes) {
  const auto run = [](Fakes& fakes, const NcclUniqueId& id, int rank) {
    Gpu gpu(fakes, rank);
    const Communicator communicator(fakes, 2, id, rank);
    const DeviceArray<float> array(gpu, {static_cast<float>(rank + 1)});
    communicator.nccl.allreduce(array.data(), array.data(), 1, float32, sum, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    CHECK_EQUAL(array.get(), std::vector<float>({3}));
  };
  int ids[2];
  REQUIRE(::pipe(ids) == 0);
  const int before = check::failures();
  const pid_t child = ::fork();
  if (child == 0) {
    NcclUniqueId id;
    if (::read(ids[0], &id, sizeof id) != sizeof id) ::_exit(2);
    Fakes fakes;
    run(fakes, id, 1);
    ::_exit(check::failures() == before ? 0 : 1);
  }
  Fakes fakes;
  NcclUniqueId id;
  OK(fakes.nccl().unique_id(&id));
  CHECK(::write(ids[1], &id, sizeof id) == sizeof id);
  run(fakes, id, 0);
  int ended = 0;
  CHECK(::waitpid(child, &ended, 0) == child);
  CHECK_EQUAL(ended, 0);
  ::close(ids[0]);
  ::close(ids[1]);
}

TEST(a_stream_does_its_tasks_in_order_and_later) {
  Fakes fakes;
  const Gpu gpu(fakes, 0);
  fakes.control.hold(gpu.stream, 1);
  const DeviceArray<int> from(gpu, {1, 2, 3}), to(gpu, {0, 0, 0});
  OK(gpu.cuda.copy(to.memory, from.memory, 12, gpu.stream));
  OK(gpu.cuda.fill(from.memory, 0, 12, gpu.stream));
  const CudaEvent event = gpu.record();
  CHECK_EQUAL(gpu.cuda.event_query(event), cuda_not_ready);
  CHECK_EQUAL(to.get(), std::vector<int>({0, 0, 0}));
  fakes.control.hold(gpu.stream, 0);
  gpu.wait(event);
  CHECK_EQUAL(to.get(), std::vector<int>({1, 2, 3}));
  CHECK_EQUAL(from.get(), std::vector<int>({0, 0, 0}));
}

TEST(a_stream_waits_for_the_event_of_another) {
  Fakes fakes;
  const Gpu gpu(fakes, 0);
  CudaStream other = nullptr;
  OK(gpu.cuda.stream_create(&other, cuda_stream_non_blocking, -5));
  fakes.control.hold(gpu.stream, 1);
  const DeviceArray<int> first(gpu, {7}), second(gpu, {0}), third(gpu, {0});
  OK(gpu.cuda.copy(second.memory, first.memory, 4, gpu.stream));
  const CudaEvent copied = gpu.record();
  OK(gpu.cuda.stream_wait_event(other, copied, 0));
  OK(gpu.cuda.copy(third.memory, second.memory, 4, other));
  CudaEvent done = nullptr;
  OK(gpu.cuda.event_create(&done, cuda_event_disable_timing));
  CHECK_EQUAL(gpu.cuda.event_query(done), cuda_success);  // never recorded
  OK(gpu.cuda.event_record(done, other));
  CHECK_EQUAL(gpu.cuda.event_query(done), cuda_not_ready);
  fakes.control.hold(gpu.stream, 0);
  gpu.wait(done);
  CHECK_EQUAL(third.get(), std::vector<int>({7}));
  OK(gpu.cuda.event_destroy(copied));
  OK(gpu.cuda.stream_destroy(other));
}

TEST(what_cuda_forbids_is_noticed) {
  Fakes fakes;
  const CudaFunctions& cuda = fakes.cuda();
  CudaEvent event = nullptr;
  CHECK(cuda.event_create(&event, 0) != cuda_success);
  CHECK_EQUAL(fakes.take_misuse(), "cuEventCreate: there is no current context");
  const Gpu gpu(fakes, 0);
  {
    const DeviceArray<int> array(gpu, {1});
    int ordinary[1] = {};
    CHECK(cuda.copy(array.memory, reinterpret_cast<CudaMemory>(ordinary), 4, gpu.stream) != cuda_success);
    CHECK_EQUAL(fakes.take_misuse(), "cuMemcpyAsync: this memory is neither this GPU's nor pinned");
    CHECK(cuda.fill(array.memory, 0, 8, gpu.stream) != cuda_success);
    CHECK_EQUAL(fakes.take_misuse(), "cuMemsetD8Async: this memory is neither this GPU's nor pinned");
    fakes.control.lend(ordinary, sizeof ordinary, 0);
    OK(cuda.copy(reinterpret_cast<CudaMemory>(ordinary), array.memory, 4, gpu.stream));
    gpu.wait(gpu.record());
    fakes.control.take_back(ordinary);
    CHECK_EQUAL(ordinary[0], 1);
    fakes.control.hold(gpu.stream, 1);
    OK(cuda.fill(array.memory, 0, 4, gpu.stream));
    CHECK(cuda.memory_free(array.memory) != cuda_success);
    CHECK_EQUAL(fakes.take_misuse(), "cuMemFree_v2: a stream still uses this memory");
    fakes.control.hold(gpu.stream, 0);
    gpu.wait(gpu.record());
  }
  const Gpu other(fakes, 1);  // this context is current now
  CHECK(cuda.stream_wait_event(gpu.stream, nullptr, 0) != cuda_success);
  CHECK_EQUAL(fakes.take_misuse(), "cuStreamWaitEvent: no stream or event of the current context");
}

TEST(failures_come_when_a_test_wants_them) {
  Fakes fakes;
  const Gpu gpu(fakes, 0);
  fakes.control.fail("cuMemAlloc_v2", 2, cuda_out_of_memory);
  CudaMemory memory = 0, more = 0;
  OK(gpu.cuda.memory_allocate(&memory, 8));
  CHECK_EQUAL(gpu.cuda.memory_allocate(&more, 8), cuda_out_of_memory);
  OK(gpu.cuda.memory_free(memory));
  CHECK_EQUAL(fakes.control.calls("cuMemAlloc_v2"), 2);
  fakes.control.fail("cuEventCreate", 1, 700);
  CudaEvent event = nullptr;
  CHECK_EQUAL(gpu.cuda.event_create(&event, 0), 700);
  CHECK_EQUAL(gpu.cuda.memory_allocate(&more, 8), 700);  // the context is broken
  fakes.control.reset();
}

TEST(collectives_give_exact_results_to_all_ranks) {
  Fakes fakes;
  run_ranks(fakes, 3, [](int rank, Gpu& gpu, Communicator& communicator) {
    const auto number = static_cast<float>(rank + 1);
    const DeviceArray<float> summed(gpu, {number, 10 * number}), given(gpu, {number, -number}), at_one(gpu, {0, 0});
    const NcclFunctions& nccl = communicator.nccl;
    nccl.allreduce(summed.data(), summed.data(), 2, float32, sum, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    CHECK_EQUAL(summed.get(), std::vector<float>({6, 60}));
    nccl.broadcast(given.data(), given.data(), 2, float32, 2, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    CHECK_EQUAL(given.get(), std::vector<float>({3, -3}));
    nccl.reduce(summed.data(), at_one.data(), 2, float32, 2 /* max */, 1, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    CHECK_EQUAL(at_one.get(), rank == 1 ? std::vector<float>({6, 60}) : std::vector<float>({0, 0}));
  });
}

TEST(a_group_is_launched_at_its_end_and_exchanges_at_once) {
  Fakes fakes;
  run_ranks(fakes, 4, [&](int rank, Gpu& gpu, Communicator& communicator) {
    const size_t count = 30'000;  // more than a channel holds
    const DeviceArray<float> input(gpu, std::vector<float>(4 * count, static_cast<float>(rank)));
    const DeviceArray<float> output(gpu, std::vector<float>(4 * count, -1));
    const NcclFunctions& nccl = communicator.nccl;
    OK(nccl.group_start());
    for (int peer = 0; peer < 4; ++peer) {
      const size_t at = count * static_cast<size_t>(peer);
      OK(nccl.send(input.data() + at, count, float32, peer, communicator.handle, gpu.stream));
      OK(nccl.receive(output.data() + at, count, float32, peer, communicator.handle, gpu.stream));
    }
    gpu.wait(gpu.record());
    CHECK_EQUAL(output.data()[0], -1.0f);
    nccl.group_end();
    finish(gpu, communicator);
    for (int peer = 0; peer < 4; ++peer) {
      const float* first = output.data() + count * static_cast<size_t>(peer);
      CHECK_EQUAL(std::vector<float>(first, first + count), std::vector<float>(count, static_cast<float>(peer)));
    }
  });
}

TEST(operators_know_every_type) {
  Fakes fakes;
  run_ranks(fakes, 2, [](int rank, Gpu& gpu, Communicator& communicator) {
    const NcclFunctions& nccl = communicator.nccl;
    const auto run = [&]<typename T>(int type, int operation, T mine) {
      const DeviceArray<T> array(gpu, {mine});
      nccl.allreduce(array.data(), array.data(), 1, type, operation, communicator.handle, gpu.stream);
      finish(gpu, communicator);
      return array.get()[0];
    };
    CHECK_EQUAL(run(0, 1, int8_t(rank ? -5 : 3)), int8_t(-15));  // product
    CHECK_EQUAL(run(1, 0, uint8_t(200)), uint8_t(144));          // wraps around
    CHECK_EQUAL(run(2, 4, int32_t(rank ? -6 : -3)), -4);         // average
    CHECK_EQUAL(run(4, 3, int64_t(rank ? 1 : -1) << 40), -(int64_t(1) << 40));
    CHECK_EQUAL(run(5, 2, uint64_t(rank ? 1 : 2) << 62), uint64_t(1) << 63);
    CHECK_EQUAL(run(8, 4, rank ? 2.0 : 3.0), 2.5);
    CHECK_EQUAL(widen(run(6, 0, narrow_float16(rank ? 0.5f : 1024))), 1024.0f);  // ties to even
    CHECK_EQUAL(widen(run(9, 2, narrow_bfloat16(rank ? -1.5f : 3.0f))), 3.0f);
    BFloat16 factor = narrow_bfloat16(rank ? 0.5f : 4.0f);
    NcclReduceOp scaled = 0;
    OK(nccl.create_scaled_sum(&scaled, &factor, 9, 1, communicator.handle));
    CHECK_EQUAL(widen(run(9, scaled, narrow_bfloat16(2))), 9.0f);
    OK(nccl.destroy_operator(scaled, communicator.handle));
  });
}

TEST(calls_that_do_not_fit_together_are_an_error_and_an_abort_ends_them) {
  Fakes fakes;
  run_ranks(fakes, 2, [](int rank, Gpu& gpu, Communicator& communicator) {
    const DeviceArray<float> array(gpu, {1, 2});
    const size_t count = rank ? 1 : 2;
    communicator.nccl.allreduce(array.data(), array.data(), count, float32, sum, communicator.handle, gpu.stream);
    NcclResult state = nccl_success;
    while (state == nccl_success || state == nccl_in_progress)
      OK(communicator.nccl.async_error(communicator.handle, &state));
    CHECK_EQUAL(state, invalid_usage);
    const CudaEvent after = gpu.record();
    CHECK_EQUAL(gpu.cuda.event_query(after), cuda_not_ready);
    communicator.abort();
    gpu.wait(after);
    CHECK_EQUAL(array.get(), std::vector<float>({1, 2}));
  });
}

TEST(a_kernel_that_never_ends_ends_with_an_abort) {
  Fakes fakes;
  fakes.control.set("hang", 1);
  run_ranks(fakes, 2, [](int, Gpu& gpu, Communicator& communicator) {
    const DeviceArray<float> array(gpu, {1});
    communicator.nccl.allreduce(array.data(), array.data(), 1, float32, sum, communicator.handle, gpu.stream);
    OK(communicator.settle());
    const CudaEvent after = gpu.record();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK_EQUAL(gpu.cuda.event_query(after), cuda_not_ready);
    communicator.abort();
    gpu.wait(after);
    CHECK_EQUAL(array.get(), std::vector<float>({1}));
  });
}

TEST(a_communicator_ends_when_all_ranks_let_it) {
  Fakes fakes;
  std::atomic<bool> may_leave = false;
  run_ranks(fakes, 2, [&](int rank, Gpu&, Communicator& communicator) {
    if (rank == 1) {
      while (!may_leave) std::this_thread::yield();
      return;  // leaves
    }
    CHECK_EQUAL(communicator.nccl.finalize(communicator.handle), nccl_in_progress);
    NcclResult state = nccl_success;
    for (int i = 0; i < 100; ++i) {
      OK(communicator.nccl.async_error(communicator.handle, &state));
      CHECK_EQUAL(state, nccl_in_progress);
    }
    may_leave = true;
    OK(communicator.settle());
    OK(communicator.nccl.destroy(communicator.handle));
    communicator.handle = nullptr;
  });
}

TEST(an_error_of_the_network_shows_in_the_state) {
  Fakes fakes;
  run_ranks(fakes, 1, [&](int, Gpu&, Communicator& communicator) {
    fakes.control.fail("ncclCommGetAsyncError", 2, 6);
    OK(communicator.settle());
    NcclResult state = nccl_success;
    OK(communicator.nccl.async_error(communicator.handle, &state));
    CHECK_EQUAL(state, 6);
    OK(communicator.nccl.async_error(communicator.handle, &state));
    CHECK_EQUAL(state, 6);  // the error persists
    communicator.abort();
  });
}

TEST(what_nccl_forbids_is_noticed) {
  Fakes fakes;
  run_ranks(fakes, 1, [&](int, Gpu& gpu, Communicator& communicator) {
    const NcclFunctions& nccl = communicator.nccl;
    float ordinary[1] = {};
    CHECK_EQUAL(nccl.allreduce(ordinary, ordinary, 1, float32, sum, communicator.handle, gpu.stream), invalid_argument);
    CHECK_EQUAL(fakes.take_misuse(), "ncclAllReduce: this memory is not on that GPU");
    const DeviceArray<float> array(gpu, {1});
    CHECK_EQUAL(nccl.send(array.data(), 1, float32, 1, communicator.handle, gpu.stream), invalid_argument);
    CHECK_EQUAL(fakes.take_misuse(), "ncclSend: there is no such rank");
    CHECK_EQUAL(nccl.destroy(communicator.handle), invalid_usage);
    CHECK_EQUAL(fakes.take_misuse(), "ncclCommDestroy: the communicator is not finalized");
    OK(nccl.group_start());
    CHECK_EQUAL(nccl.allreduce(array.data(), array.data(), 1, 99, sum, communicator.handle, gpu.stream),
                invalid_argument);
    CHECK_EQUAL(fakes.take_misuse(), "ncclAllReduce: there is no such type");
    CHECK_EQUAL(nccl.group_end(), invalid_argument);
    CHECK_EQUAL(std::string(nccl.last_error(communicator.handle)), "there is no such type");
  });
}

TEST(ranks_share_a_gpu_only_where_nccl_lets_them) {
  Fakes fakes;
  const auto state_with = [&](int version) {
    fakes.control.set("nccl_version", version);
    NcclUniqueId id;
    OK(fakes.nccl().unique_id(&id));
    NcclResult states[2] = {};
    const auto join = [&](int rank) {
      const Gpu gpu(fakes, 0);
      const Communicator communicator(fakes, 2, id, rank);
      states[rank] = communicator.state;
    };
    std::thread other(join, 1);
    join(0);
    other.join();
    CHECK_EQUAL(states[0], states[1]);
    return states[0];
  };
  CHECK_EQUAL(state_with(23003), invalid_usage);
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  CHECK_EQUAL(state_with(22803), invalid_usage);
  CHECK_EQUAL(state_with(23003), nccl_success);
  ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

CHECK_MAIN()
