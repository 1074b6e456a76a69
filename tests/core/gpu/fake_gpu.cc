// Tests of the fake libcuda in tests/fake_gpu: it does what CUDA promises, and no more.
#include "fake_gpu_fixture.h"

using namespace fixture;

TEST(ranks_may_be_processes) {
  const auto run = [](Fakes& fakes, const NcclUniqueId& id, int rank) {
    TestGpu gpu(fakes, rank);
    const TestCommunicator communicator(fakes, 2, id, rank);
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

TEST(a_forked_process_has_none_of_its_parent_s_gpus) {
  Fakes fakes;
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    const bool all_fail = fakes.cuda().init(0) == 3 && fakes.cuda().device_count(&count) == 3;
    ::_exit(all_fail ? 0 : 1);
  }
  int ended = 0;
  CHECK(::waitpid(child, &ended, 0) == child);
  CHECK_EQUAL(ended, 0);
  OK(fakes.cuda().init(0));
}

TEST(memory_may_be_finite) {
  Fakes fakes;
  fakes.control.set("memory", 1000);
  const TestGpu gpu(fakes, 0);
  CudaMemory first = 0, second = 0;
  OK(gpu.cuda.memory_allocate(&first, 600));
  CHECK_EQUAL(gpu.cuda.memory_allocate(&second, 401), cuda_out_of_memory);
  const TestGpu other(fakes, 1);
  OK(gpu.cuda.memory_allocate(&second, 401));  // on the other GPU
  OK(gpu.cuda.memory_free(first));
  OK(gpu.cuda.memory_free(second));
}

TEST(frees_and_pinned_allocations_may_wait_for_the_gpu) {
  Fakes fakes;
  fakes.control.set("implicit_waits", 1);
  const TestGpu gpu(fakes, 0);
  const DeviceArray<int> array(gpu, {1}), unused(gpu, {1});
  void* pinned = nullptr;
  OK(fakes.control.fill(gpu.stream, array.memory, 0, 4));
  OK(gpu.cuda.host_allocate(&pinned, 8, 0));
  CHECK_EQUAL(array.get(), std::vector<int>({0}));
  fakes.control.hold(gpu.stream, 1);
  OK(fakes.control.fill(gpu.stream, array.memory, 1, 4));
  fakes.control.set("free_limit", 10);
  OK(gpu.cuda.host_free(pinned));
  CHECK_EQUAL(fakes.take_misuse(), "cuMemFreeHost: it waits for a task on the GPU, which does not end");
  fakes.control.hold(gpu.stream, 0);
  gpu.wait(gpu.record());
}

TEST(a_stream_does_its_tasks_in_order_and_later) {
  Fakes fakes;
  const TestGpu gpu(fakes, 0);
  fakes.control.hold(gpu.stream, 1);
  const DeviceArray<int> from(gpu, {1, 2, 3}), to(gpu, {0, 0, 0});
  OK(gpu.cuda.copy(to.memory, from.memory, 12, gpu.stream));
  OK(fakes.control.fill(gpu.stream, from.memory, 0, 12));
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
  const TestGpu gpu(fakes, 0);
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

TEST(accesses_without_an_order_are_noticed_whenever_they_run) {
  Fakes fakes;
  fakes.control.set("delay", 0);
  const TestGpu gpu(fakes, 0);
  CudaStream other = nullptr;
  OK(gpu.cuda.stream_create(&other, cuda_stream_non_blocking, -5));
  const DeviceArray<int> source(gpu, {7, 8}), memory(gpu, {0, 0}), copied(gpu, {0, 0});
  const CudaMemory second = memory.memory + 4;
  const auto end = [&](CudaStream stream) {
    CudaEvent event = nullptr;
    OK(gpu.cuda.event_create(&event, cuda_event_disable_timing));
    OK(gpu.cuda.event_record(event, stream));
    gpu.wait(event);
  };
  const auto is_race = [&](CudaMemory to, CudaMemory from) {
    CHECK(fakes.control.await_tasks(nullptr, 60));  // no access is a race of the test's own
    OK(gpu.cuda.copy(to, from, 4, other));
    const std::string found = fakes.take_misuse();
    fakes.control.set("delay", 0);
    end(other);
    end(gpu.stream);
    return found;
  };
  OK(gpu.cuda.copy(memory.memory, source.memory, 4, gpu.stream));
  const std::string found = is_race(copied.memory, memory.memory);  // read after write
  const std::string from = "of stream ", both = "reads: the same memory, in no order with it: cuMemcpyAsync (task ";
  CHECK(found.starts_with("cuMemcpyAsync (task ") && found.find(from) < found.find(both));
  CHECK(found.ends_with("writes"));
  OK(gpu.cuda.copy(memory.memory, source.memory, 4, gpu.stream));
  CHECK(is_race(memory.memory, source.memory) != "");  // write after write
  OK(gpu.cuda.copy(copied.memory, memory.memory, 4, gpu.stream));
  CHECK(is_race(memory.memory, source.memory) != "");  // write after read
  OK(gpu.cuda.copy(memory.memory, source.memory, 4, gpu.stream));
  CHECK_EQUAL(is_race(copied.memory, source.memory), "");  // read after read
  OK(gpu.cuda.copy(memory.memory, source.memory, 4, gpu.stream));
  CHECK_EQUAL(is_race(second, source.memory), "");  // beside it
  OK(gpu.cuda.copy(memory.memory, source.memory, 4, gpu.stream));
  end(gpu.stream);  // which the host sees
  CHECK_EQUAL(is_race(copied.memory, memory.memory), "");
  CudaEvent event = gpu.record();
  OK(gpu.cuda.copy(memory.memory, source.memory, 4, gpu.stream));
  OK(gpu.cuda.stream_wait_event(other, event, 0));  // recorded too early
  CHECK(is_race(copied.memory, memory.memory) != "");
  OK(gpu.cuda.copy(memory.memory, source.memory, 4, gpu.stream));
  OK(gpu.cuda.event_record(event, gpu.stream));
  OK(gpu.cuda.stream_wait_event(other, event, 0));
  OK(gpu.cuda.event_record(event, gpu.stream));  // a later record changes no wait
  CHECK_EQUAL(is_race(copied.memory, memory.memory), "");
  OK(gpu.cuda.event_destroy(event));
  OK(gpu.cuda.stream_destroy(other));
}

TEST(the_host_uses_pinned_memory_when_it_knows_that_a_task_has_ended) {
  Fakes fakes;
  fakes.control.set("delay", 0);
  const TestGpu gpu(fakes, 0);
  const DeviceArray<int> array(gpu, {7});
  void* pinned = nullptr;
  OK(gpu.cuda.host_allocate(&pinned, 4, 0));
  int* number = static_cast<int*>(pinned);
  const auto address = reinterpret_cast<CudaMemory>(pinned);
  const auto end = [&] { gpu.wait(gpu.record()); };
  *number = 1;
  OK(gpu.cuda.copy(array.memory, address, 4, gpu.stream));
  CHECK_EQUAL(*number, 1);  // as the task does
  CHECK_EQUAL(std::string(fakes.control.misuse()), "");
  *number = 2;
  const std::string written = fakes.take_misuse();
  CHECK(written.starts_with("the host: it uses pinned memory in no order with a task: cuMemcpyAsync (task "));
  CHECK(written.ends_with("reads"));
  end();
  OK(fakes.control.fill(gpu.stream, address, 3, 4));
  CHECK(fakes.control.await_tasks(nullptr, 60));
  CHECK_EQUAL(*number, 0x3030303);
  CHECK(fakes.take_misuse().ends_with("writes"));
  OK(fakes.control.fill(gpu.stream, address, 4, 4));
  end();
  CHECK_EQUAL(*number, 0x4040404);
  OK(gpu.cuda.host_free(pinned));
}

TEST(what_cuda_forbids_is_noticed) {
  Fakes fakes;
  const CudaFunctions& cuda = fakes.cuda();
  CudaEvent event = nullptr;
  CHECK(cuda.event_create(&event, 0) != cuda_success);
  CHECK_EQUAL(fakes.take_misuse(), "cuEventCreate: there is no current context");
  const TestGpu gpu(fakes, 0);
  {
    const DeviceArray<int> array(gpu, {1});
    int ordinary[1] = {};
    CHECK(cuda.copy(array.memory, reinterpret_cast<CudaMemory>(ordinary), 4, gpu.stream) != cuda_success);
    CHECK_EQUAL(fakes.take_misuse(), "cuMemcpyAsync: this memory is neither this GPU's nor pinned");
    fakes.control.lend(ordinary, sizeof ordinary, 0);
    OK(cuda.copy(reinterpret_cast<CudaMemory>(ordinary), array.memory, 4, gpu.stream));
    gpu.wait(gpu.record());
    fakes.control.take_back(ordinary);
    CHECK_EQUAL(ordinary[0], 1);
    fakes.control.hold(gpu.stream, 1);
    OK(fakes.control.fill(gpu.stream, array.memory, 0, 4));
    CHECK(cuda.memory_free(array.memory) != cuda_success);
    const std::string used = fakes.take_misuse();
    CHECK(used.starts_with("cuMemFree_v2: a stream still uses this memory: fake_gpu_fill (task "));
    fakes.control.hold(gpu.stream, 0);
    gpu.wait(gpu.record());
  }
  const TestGpu other(fakes, 1);  // this context is current now
  CHECK(cuda.stream_wait_event(gpu.stream, nullptr, 0) != cuda_success);
  CHECK_EQUAL(fakes.take_misuse(), "cuStreamWaitEvent: no stream or event of the current context");
}

TEST(copies_of_a_batch_come_in_the_order_of_the_stream_but_in_none_among_themselves) {
  Fakes fakes;
  const TestGpu gpu(fakes, 0);
  const DeviceArray<int> from(gpu, {1, 2, 3}), to(gpu, {0, 0, 0});
  const auto copy = [&](std::vector<CudaMemory> targets, std::vector<CudaMemory> sources, CudaStream stream) {
    std::vector<size_t> bytes(targets.size(), 4);
    CudaCopyAttributes attributes;
    size_t first = 0, failed = 0;
    const CudaResult result = gpu.cuda.copy_batch(targets.data(), sources.data(), bytes.data(), bytes.size(),
                                                  &attributes, &first, 1, &failed, stream);
    CHECK_EQUAL(failed, SIZE_MAX);
    return result;
  };
  fakes.control.hold(gpu.stream, 1);
  OK(copy({to.memory, to.memory + 8}, {from.memory + 4, from.memory}, gpu.stream));
  OK(fakes.control.fill(gpu.stream, from.memory, 0, 12));
  CHECK_EQUAL(to.get(), std::vector<int>({0, 0, 0}));
  fakes.control.hold(gpu.stream, 0);
  gpu.wait(gpu.record());
  CHECK_EQUAL(to.get(), std::vector<int>({2, 0, 1}));
  CHECK_EQUAL(fakes.control.copied(), 8);
  CHECK(copy({to.memory}, {from.memory}, nullptr) != cuda_success);
  CHECK_EQUAL(fakes.take_misuse(), "cuMemcpyBatchAsync: a batch cannot go to the default stream");
  const std::string conflict = "cuMemcpyBatchAsync: a copy uses memory that another one of the batch writes";
  CHECK(copy({to.memory, to.memory + 4}, {from.memory, to.memory}, gpu.stream) != cuda_success);
  CHECK_EQUAL(fakes.take_misuse(), conflict);
  CHECK(copy({to.memory, to.memory}, {from.memory, from.memory}, gpu.stream) != cuda_success);
  CHECK_EQUAL(fakes.take_misuse(), conflict);
}

// Returns the text of a kernel with these instructions; %at holds its argument, an address.
std::string kernel_that(const std::string& instructions) {
  return ".visible .entry change(.param .align 8 .b8 argument[8])\n{\n  .reg .b64 %at;\n  .reg .b16 %byte<2>;\n"
         "  ld.param.u64 %at, [argument];\n" +
         instructions + "  ret;\n}\n";
}

TEST(kernels_are_what_their_text_says) {
  Fakes fakes;
  const TestGpu gpu(fakes, 0);
  const auto launch = [&](const std::string& text, CudaMemory argument, unsigned rows = 1) {
    CudaModule module = nullptr;
    CudaKernel kernel = nullptr;
    if (const CudaResult result = gpu.cuda.module_load(&module, text.c_str())) return result;
    OK(gpu.cuda.module_kernel(&kernel, module, "change"));
    void* arguments[] = {&argument};
    const CudaResult result = gpu.cuda.kernel_launch(kernel, 1, rows, 1, 1, 1, 1, 0, gpu.stream, arguments, nullptr);
    OK(gpu.cuda.module_unload(module));
    return result;
  };
  const DeviceArray<uint16_t> array(gpu, {7, 8, 9, 10});
  const std::string copies = kernel_that("  ld.global.u16 %byte0, [%at+2];\n  st.global.u16 [%at], %byte0;\n");
  fakes.control.hold(gpu.stream, 1);
  OK(launch(copies, array.memory));
  CHECK_EQUAL(array.get()[0], 7);
  fakes.control.hold(gpu.stream, 0);
  gpu.wait(gpu.record());
  CHECK_EQUAL(array.get(), std::vector<uint16_t>({8, 8, 9, 10}));
  const auto refused = [&](const std::string& misuse, const std::string& text, CudaMemory argument, unsigned rows = 1) {
    CHECK(launch(text, argument, rows) != cuda_success);
    CHECK_EQUAL(fakes.take_misuse(), misuse);
  };
  refused("cuLaunchKernel: this memory is neither this GPU's nor pinned", copies, array.memory + 6);
  refused("cuLaunchKernel: ld.global.u16 at an address that is no multiple of its size", copies, array.memory + 1);
  refused("cuLaunchKernel: there is no such grid", copies, array.memory, 70'000);
  refused("cuModuleLoadData: the fake does not know the instruction sin.approx.f32",
          kernel_that("  sin.approx.f32 %byte0, %byte0;\n"), array.memory);
}

TEST(failures_come_when_a_test_wants_them) {
  Fakes fakes;
  const TestGpu gpu(fakes, 0);
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
