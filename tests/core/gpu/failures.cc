// Failures on GPUs: calls that fail, kernels and calls of NCCL that never end, ranks that abort or are lost.
// Every handle ends, every rank learns the reason, nobody waits for ever, and the next world works.
#include <barrier>

#include "gpu_world.h"

using namespace world;

namespace {

// Returns the endings of one step on two ranks, where the nth call of a function fails.
std::vector<Status> endings_with(Fake& fake, const char* backend, const char* function, int nth, int result) {
  std::vector<Status> endings(2);
  World ranks(2, on_gpus({{"gpu_backend", backend}}));
  fake.fail(function, nth, result);
  fake.is_to_break();
  ranks.run([&](int rank, Context& context) { endings[static_cast<size_t>(rank)] = step(fake, context, rank); });
  return endings;
}

// A kernel of another library of the process, as torch's own NCCL, on a GPU: it ends when it is aborted.
struct ForeignKernel {
  ForeignKernel(Fake& fake, int device)
      : libraries(Fake::config()), data(fake, device, floats(1, 1)), stream(fake, device) {
    const GpuDevice::Scope scope(&stream.device());
    NcclUniqueId id;
    NcclConfig config;
    config.blocking = 1;
    CHECK_EQUAL(libraries.nccl().unique_id(&id), nccl_success);
    CHECK_EQUAL(libraries.nccl().init(&communicator, 1, id, 0, &config), nccl_success);
    auto* memory = reinterpret_cast<void*>(data.address());
    CHECK_EQUAL(libraries.nccl().allreduce(memory, memory, 1, nccl_float32, nccl_sum, communicator, stream.get()),
                nccl_success);
  }
  void abort() const { CHECK_EQUAL(libraries.nccl().abort(communicator), nccl_success); }

  const GpuLibraries libraries;
  OnGpu data;
  UserStream stream;
  NcclCommunicator communicator = nullptr;
};

}  // namespace

TEST(a_world_works_after_another) {
  Fake fake;
  for (int generation = 0; generation < 3; ++generation) {
    World ranks(3, on_gpus({}, generation % 2 ? Over::sockets : Over::memory));
    ranks.run([&](int rank, Context& context) {
      for (int i = 0; i < 3; ++i) expect_ok(step(fake, context, rank));
    });
  }
}

TEST(an_error_of_any_call_ends_all_ranks) {
  const char* const of_cuda[] = {"cuDeviceGet",         "cuDevicePrimaryCtxRetain",
                                 "cuCtxPushCurrent_v2", "cuStreamCreateWithPriority",
                                 "cuStreamWaitEvent",   "cuEventCreate",
                                 "cuEventRecord",       "cuEventQuery",
                                 "cuMemAlloc_v2",       "cuMemHostAlloc",
                                 "cuMemcpyAsync"};
  const char* const of_nccl[] = {"ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclRedOpCreatePreMulSum",
                                 "ncclGroupStart",         "ncclGroupEnd",          "ncclAllReduce",
                                 "ncclAllGather"};
  const auto check = [](const char* backend, const char* function, int result) {
    for (int nth : {1, 2, 5}) {
      Fake fake;
      const std::vector<Status> endings = endings_with(fake, backend, function, nth, result);
      // A rank that was done before another one failed has its result.
      const bool all_are_well =
          std::all_of(endings.begin(), endings.end(), [](const Status& ending) { return ending.is_ok(); });
      CHECK_EQUAL(all_are_well, fake.calls(function) < nth);
      for (const Status& ending : endings) {
        if (ending.is_ok()) continue;
        const bool tells_why =
            contains(ending, "CUDA says") || contains(ending, "NCCL says") || contains(ending, "no GPU");
        if (!tells_why)
          check::fail(__FILE__, __LINE__, format("%s, call %d of %s: '%s'", backend, nth, function, ending.text()));
      }
    }
  };
  for (const char* function : of_cuda)
    for (const char* backend : {"auto", "staged"}) check(backend, function, 999);
  for (const char* function : of_nccl) check("auto", function, 3);
}

// Another GPU may be current in a thread, which must not be used in place of the one that could not be made current.
TEST(a_gpu_that_cannot_be_made_current_is_not_used) {
  Fake fake;
  const UserStream other(fake, 1);
  const GpuLibraries libraries(Fake::config());
  std::unique_ptr<Gpu> gpu;
  CHECK(Gpu::open(libraries, 0, gpu).is_ok());
  const GpuDevice::Scope is_current(&other.device());
  const auto check = [&](const Status& status, const char* function) {
    CHECK_EQUAL(status.code(), SRT_DEVICE);
    CHECK(contains(status, "cuCtxPushCurrent"));
    CHECK_EQUAL(fake.calls(function), 0);
  };
  fake.reset();
  MemoryBlock block;
  fake.fail("cuCtxPushCurrent_v2", 1, 999);
  check(gpu->memory().take(100, block), "cuMemAlloc_v2");
  GpuEventPtr event;
  fake.fail("cuCtxPushCurrent_v2", 1, 999);
  check(gpu->events().record(gpu->launches(), event), "cuEventCreate");
  CHECK(gpu->events().record(gpu->launches(), event).is_ok());
  fake.fail("cuCtxPushCurrent_v2", 1, 999);
  check(event->hold_back(gpu->copies()), "cuStreamWaitEvent");
  CHECK_EQUAL(fake.calls("cuCtxPopCurrent_v2"), 1);  // after the one that was pushed
}

TEST(memory_is_reserved_before_the_program_takes_all_of_it) {
  Fake fake;
  const GpuLibraries libraries(Fake::config());
  std::unique_ptr<Gpu> gpu;
  CHECK(Gpu::open(libraries, 0, gpu).is_ok());
  fake.set("memory", 1);  // no more is left
  MemoryBlock first, second;
  CHECK(gpu->memory().take(1 << 20, first).is_ok());
  CHECK_EQUAL(gpu->memory().take(1 << 20, second).code(), SRT_OUT_OF_MEMORY);
}

// A free waits for all work on the GPU, also for kernels that wait for a rank which is lost.
TEST(memory_is_freed_only_while_the_gpu_waits_for_no_rank) {
  Fake fake;
  const GpuLibraries libraries(Fake::config());
  std::unique_ptr<Gpu> gpu;
  CHECK(Gpu::open(libraries, 0, gpu).is_ok());
  fake.set("memory", 1);
  const GpuDevice::Scope scope(&gpu->device());
  OnGpu data(fake, 0, floats(100, 1)), copy(fake, 0, floats(100, 1));
  fake.hold(gpu->launches(), 1);
  CHECK(gpu->copy({copy.bytes().data(), data.bytes().data(), 400}, gpu->launches()).is_ok());
  MemoryBlock block;
  CHECK_EQUAL(gpu->memory().take(64 << 20, block).code(), SRT_OUT_OF_MEMORY);
  CHECK_EQUAL(fake.calls("cuMemFree_v2"), 0);
  fake.hold(gpu->launches(), 0);
  for (const Nanoseconds deadline = now() + patience; fake.calls("cuMemFree_v2") == 0 && now() < deadline;)
    CHECK_EQUAL(gpu->memory().take(64 << 20, block).code(), SRT_OUT_OF_MEMORY);
  CHECK_EQUAL(fake.calls("cuMemFree_v2"), 1);
}

TEST(an_error_names_rank_tensor_and_the_library_s_words) {
  Fake fake;
  const std::vector<Status> endings = endings_with(fake, "auto", "ncclAllReduce", 1, 3);
  for (const Status& ending : endings) {
    CHECK_EQUAL(ending.code(), SRT_DEVICE);
    for (const char* part : {"rank ", "on here", "'large'", "ncclAllReduce", "internal error"})
      if (!contains(ending, part)) check::fail(__FILE__, __LINE__, std::string(part) + ": " + ending.text());
  }
}

TEST(a_kernel_that_never_ends_meets_the_deadline) {
  Fake fake;
  fake.set("hang", 1);
  {
    World ranks(2, on_gpus({{"progress_deadline", "0.3"}, {"stall_report", "0.1"}}));
    ranks.run([&](int rank, Context& context) {
      GpuSum sum(fake, rank, "endless");
      const Status ending = end_of(context, sum.request);
      CHECK_EQUAL(ending.code(), SRT_TIMEOUT);
      CHECK(contains(ending, "'endless'"));
    });
  }
  fake.set("hang", 0);
  World ranks(2, on_gpus());
  ranks.run([&](int rank, Context& context) { expect_ok(step(fake, context, rank)); });
}

// Such a call may hold the thread that checks deadlines.
TEST(a_call_of_a_library_that_does_not_return_is_named) {
  const std::pair<const char*, const char*> calls[] = {
      {"cuMemAlloc_v2", "rank 0 (pid 100 on here) has been in cuMemAlloc of the CUDA driver for "},
      {"cuEventQuery", "rank 1 (pid 101 on here) has been in cuEventQuery of the CUDA driver for "},
      {"ncclAllReduce", " on here) has been in ncclAllReduce of NCCL for "}};  // the fake lets one rank at a time in
  for (const auto& call : calls) {
    const char *function = call.first, *text = call.second;
    Fake fake;
    const Said said;
    World ranks(2, saying(said, {{"stall_report", "0.1"}}));
    fake.hold_calls(function, 1);
    std::thread watcher([&] {
      for (int i = 0; i < 20'000 && said.times(text) < 2; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      fake.hold_calls(function, 0);
    });
    ranks.run([&](int rank, Context& context) { expect_ok(step(fake, context, rank)); });
    watcher.join();
    if (said.times(text) < 2) check::fail(__FILE__, __LINE__, said.text());
  }
}

TEST(calls_that_return_are_not_named) {
  Fake fake;
  const Said said;
  World ranks(2, saying(said, {{"stall_report", "2"}}));  // on a busy machine, a call may last for some 0.1 s
  ranks.run([&](int rank, Context& context) {
    expect_ok(step(fake, context, rank));
    if (rank == 0) std::this_thread::sleep_for(std::chrono::seconds(3));
    expect_ok(step(fake, context, rank));
  });
  CHECK_EQUAL(said.times("has been in cu"), 0);
}

TEST(an_input_may_take_longer_than_bytes_may) {
  for (const bool all_are_late : {true, false}) {
    Fake fake;
    const Said said;
    World ranks(2, saying(said, {{"progress_deadline", all_are_late ? "0.05" : "0.3"}, {"stall_report", "0.1"}}));
    std::barrier waited(2);
    ranks.run([&](int rank, Context& context) {
      CHECK(step(fake, context, rank).is_ok());
      GpuSum sum(fake, rank, "x");
      UserStream stream(fake, rank);
      stream.hold(all_are_late || rank == 1);
      const Ticket handle = start(context, sum.in(stream));
      CHECK_EQUAL(context.wait(&handle, 1, seconds(1)).code(),
                  SRT_IN_PROGRESS);  // 20 times, or three times the deadline
      waited.arrive_and_wait();
      stream.hold(false);
      expect_ok(context.wait(&handle, 1, patience));
      context.release(&handle, 1);
    });
    CHECK(said.times("the GPU of rank 1 (pid 101 on here) has been computing the input of 'x'") > 0);
  }
}

TEST(a_rank_that_is_lost_ends_what_waits_while_an_input_is_computed) {
  for (const int version : {22803, 22105}) {
    Fake fake;
    fake.set("nccl_version", version);
    fake.is_to_break();  // the lost rank frees nothing
    Options options = on_gpus({}, Over::sockets);
    options.shut_down = false;
    World ranks(2, options);
    std::barrier launched(2);
    ranks.run([&](int rank, Context& context) {
      CHECK(step(fake, context, rank).is_ok());
      GpuSum sum(fake, rank, "x"), next(fake, rank, "next");
      UserStream stream(fake, rank);
      if (rank == 0) stream.hold(true);
      const Ticket handle = start(context, sum.in(stream));
      expect_ok(context.wait_on_stream(&handle, 1, stream.number(), patience));
      launched.arrive_and_wait();
      if (rank == 1) return ranks.lose(rank);
      CHECK_EQUAL(end_of(context, next.in(stream)).code(), SRT_PEER_LOST);  // while the input is not there
      CHECK_EQUAL(context.poll(handle).code(), SRT_IN_PROGRESS);
      stream.hold(false);
      CHECK_EQUAL(context.wait(&handle, 1, patience).code(), SRT_PEER_LOST);
    });
  }
}

TEST(nccl_may_connect_for_longer_than_bytes_may_take) {
  Fake fake;
  fake.set("init_hang", 1);
  const Said said;
  World ranks(2, saying(said, {{"progress_deadline", "1"}, {"stall_report", "0.1"}}));
  std::barrier connecting(2);
  ranks.run([&](int rank, Context& context) {
    GpuSum sum(fake, rank, "x");
    const Ticket handle = start(context, sum.request);
    CHECK_EQUAL(context.wait(&handle, 1, seconds(2)).code(), SRT_IN_PROGRESS);
    connecting.arrive_and_wait();
    fake.set("init_hang", 0);
    expect_ok(context.wait(&handle, 1, patience));
  });
  CHECK(said.times("NCCL has been connecting the GPUs of rank 0") > 0);
}

TEST(nccl_that_never_connects_meets_a_deadline) {
  Fake fake;
  fake.set("init_hang", 1);
  World ranks(2, on_gpus({{"progress_deadline", "0.05"}}));
  ranks.run([&](int rank, Context& context) {
    GpuSum sum(fake, rank, "x");
    const Status ending = end_of(context, sum.request);
    CHECK_EQUAL(ending.code(), SRT_TIMEOUT);
    CHECK(contains(ending, "NCCL has been connecting the GPUs of rank 0"));
  });
}

// The first calls of NCCL load plugins, and search the host for network interfaces.
TEST(the_engine_goes_on_while_nccl_starts) {
  for (const char* function : {"ncclGetUniqueId", "ncclCommInitRankConfig"}) {
    Fake fake;
    fake.hold_calls(function, 1);
    World ranks(2, on_gpus());
    std::barrier added(2);
    ranks.run([&](int rank, Context& context) {
      GpuSum sum(fake, rank, "x");
      const Ticket handle = start(context, sum.request);
      while (fake.calls(function) == 0) std::this_thread::yield();
      add_set(context, {0});
      added.arrive_and_wait();
      fake.hold_calls(function, 0);
      expect_ok(context.wait(&handle, 1, patience));
    });
  }
}

TEST(nccl_that_never_starts_meets_a_deadline) {
  for (const char* function : {"ncclGetUniqueId", "ncclCommInitRankConfig"}) {
    Fake fake;
    const int before = fake.alive();
    fake.hold_calls(function, 1);
    {
      World ranks(2, on_gpus({{"progress_deadline", "0.05"}}));
      ranks.run([&](int rank, Context& context) {
        GpuSum sum(fake, rank, "x");
        const Status ending = end_of(context, sum.request);
        CHECK_EQUAL(ending.code(), SRT_TIMEOUT);
      });
    }
    fake.hold_calls(function, 0);
    while (fake.alive() != before) std::this_thread::yield();  // what the call has made is freed by its thread
  }
}

TEST(a_rank_that_gives_up_ends_what_is_on_the_gpus_of_others) {
  Fake fake;
  fake.set("hang", 1);
  World ranks(3, on_gpus());
  std::barrier launched(3);
  ranks.run([&](int rank, Context& context) {
    const Launched sum(fake, context, rank);
    launched.arrive_and_wait();
    if (rank == 1) context.abort("the loss is not a number");
    const Status ending = context.wait(&sum.handle, 1, patience);
    CHECK_EQUAL(ending.code(), SRT_ABORTED);
    CHECK(contains(ending, "the loss is not a number"));
  });
}

// An abort waits for all kernels on the GPU. One of another library may itself wait for a rank that has to learn of the
// failure. The engine waits for the abort of an operation that NCCL is still launching.
TEST(others_learn_of_a_failure_before_an_abort_waits_for_the_gpu) {
  Fake fake;
  fake.set("hang", 1);
  const ForeignKernel foreign(fake, 0);
  while (fake.calls("ncclKernel") == 0) std::this_thread::yield();
  fake.set("hang", 0);
  GpuSum connecting[] = {{fake, 0, "connecting"}, {fake, 1, "connecting"}}, sums[] = {{fake, 0, "x"}, {fake, 1, "x"}};
  World ranks(2, on_gpus({}, Over::sockets));
  std::barrier all(2);
  ranks.run([&](int rank, Context& context) {
    expect_ok(end_of(context, connecting[rank].request));
    all.arrive_and_wait();
    const int launches = fake.calls("ncclGroupEnd");
    if (rank == 0) fake.set("polls", 1 << 30);  // the launch does not end
    all.arrive_and_wait();
    const Ticket handle = start(context, sums[rank].request);
    while (fake.calls("ncclGroupEnd") < launches + 2) std::this_thread::yield();
    all.arrive_and_wait();
    if (rank == 0) return context.abort("the loss is not a number");
    CHECK_EQUAL(context.wait(&handle, 1, patience).code(), SRT_ABORTED);
    foreign.abort();
  });
}

TEST(a_rank_that_is_lost_ends_what_waits_for_it_on_the_gpus_of_others) {
  Fake fake;
  fake.set("hang", 1);
  fake.is_to_break();  // the lost rank frees nothing
  Options options = on_gpus({}, Over::sockets);
  options.shut_down = false;
  World ranks(2, options);
  std::barrier launched(2);
  ranks.run([&](int rank, Context& context) {
    const Launched sum(fake, context, rank);
    launched.arrive_and_wait();
    if (rank == 1) return ranks.lose(rank);
    const Status ending = context.wait(&sum.handle, 1, patience);
    CHECK_EQUAL(ending.code(), SRT_PEER_LOST);
    CHECK(contains(ending, "rank 1"));
  });
}

TEST(an_input_that_never_comes_ends_with_the_world) {
  Fake fake;
  World ranks(2, on_gpus());
  std::barrier queued(2);
  ranks.run([&](int rank, Context& context) {
    GpuSum sum(fake, rank, "x");
    UserStream stream(fake, rank);
    stream.hold(true);
    const Ticket handle = start(context, sum.in(stream));
    queued.arrive_and_wait();
    if (rank == 0) context.abort("enough");
    CHECK_EQUAL(context.wait(&handle, 1, patience).code(), SRT_ABORTED);
  });
}

TEST(no_gpu_is_a_refusal_of_the_request_alone) {
  Fake fake(0);
  World ranks(2, on_gpus());
  ranks.run([&](int, Context& context) {
    const int64_t count = 10;
    std::vector<float> data(10, 1);
    srt_request request = world::in_place(SRT_ALLREDUCE, "x", data, count, DType::float32);
    const Status refused = end_of(context, on_gpu(request, 0));
    CHECK_EQUAL(refused.code(), SRT_UNSUPPORTED);
    CHECK(contains(refused, "libcuda"));
    run_well(context, request);
  });
}
