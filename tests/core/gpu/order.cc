// The order of events on GPUs: inputs that become ready late, streams that wait where the host does not, sets that
// overlap, ranks that have joined, memory that is reused.
#include <barrier>
#include <random>

#include "gpu_world.h"

using namespace world;

namespace {

int64_t wrong_in(std::vector<uint8_t>& bytes, float expected) {
  const std::vector<float> values = values_in<float>(bytes);
  return std::count_if(values.begin(), values.end(), [&](float value) { return value != expected; });
}

using GpuBody = std::function<void(Fake&, int, Context&)>;

// Runs ranks that may have agreed on the backend before: only then are operations through NCCL reported at once.
void on_backend(const char* backend, bool has_agreed, int size, const GpuBody& body) {
  Fake fake;
  World ranks(size, on_gpus({{"gpu_backend", backend}}));
  ranks.run([&](int rank, Context& context) {
    if (has_agreed) expect_ok(step(fake, context, rank));
    body(fake, rank, context);
  });
}

void on_each_backend(int size, const GpuBody& body) {
  for (const char* backend : {"auto", "staged"})
    for (const bool has_agreed : {false, true}) on_backend(backend, has_agreed, size, body);
}

}  // namespace

TEST(an_input_that_is_late_for_the_host_holds_up_nothing_else) {
  const auto body = [](Fake& fake, int rank, Context& context, DType dtype) {
    const int64_t count = 1000;
    OnGpu late(fake, rank, floats(count, 1)), early(fake, rank, floats(count, 2));
    UserStream busy(fake, rank), idle(fake, rank);
    if (rank == 1) busy.hold(true);
    srt_request requests[] = {in_place(SRT_ALLREDUCE, "late", late, count, rank, busy.number()),
                              in_place(SRT_ALLREDUCE, "early", early, count, rank, idle.number())};
    requests[0].dtype = static_cast<int32_t>(dtype);
    Ticket handles[2];
    expect_ok(context.enqueue(requests, 2, handles));
    expect_ok(context.wait(&handles[1], 1, patience));
    CHECK_EQUAL(wrong_in(early.bytes(), 4), 0);
    if (rank == 1) CHECK_EQUAL(context.poll(handles[0]).code(), SRT_IN_PROGRESS);
    busy.hold(false);
    expect_ok(context.wait(&handles[0], 1, patience));
    if (dtype == DType::float32) CHECK_EQUAL(wrong_in(late.bytes(), 2), 0);
    context.release(handles, 2);
  };
  const auto of = [&](DType dtype) -> GpuBody {
    return [&body, dtype](Fake& fake, int rank, Context& context) { body(fake, rank, context, dtype); };
  };
  for (const char* backend : {"auto", "staged"}) on_backend(backend, false, 2, of(DType::float32));
  on_backend("staged", true, 2, of(DType::float32));
  on_backend("auto", true, 2, of(DType::int16));  // which NCCL does not have
}

TEST(the_host_does_not_wait_for_an_input) {
  std::barrier waits(2);
  on_backend("auto", true, 2, [&](Fake& fake, int rank, Context& context) {
    const int64_t count = 20'000;
    OnGpu source(fake, rank, floats(count, static_cast<float>(rank + 1))), data(fake, rank, floats(count, 0));
    OnGpu copied(fake, rank, floats(count, 0));
    UserStream stream(fake, rank), other(fake, rank);
    stream.hold(true);
    stream.copy(data, source);
    const srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, rank, stream.number());
    const Ticket handle = start(context, request);
    expect_ok(context.wait_on_stream(&handle, 1, other.number(), patience));
    other.copy(copied, data);
    CHECK_EQUAL(context.poll(handle).code(), SRT_IN_PROGRESS);
    waits.arrive_and_wait();
    stream.hold(false);
    other.finish();
    CHECK_EQUAL(wrong_in(copied.bytes(), 3), 0);
    expect_ok(context.wait(&handle, 1, patience));
    context.release(&handle, 1);
  });
}

TEST(inputs_of_several_streams_are_awaited_by_the_gpu) {
  std::barrier waits(2);
  on_backend("auto", true, 2, [&](Fake& fake, int rank, Context& context) {
    const int64_t count = 300;
    OnGpu source(fake, rank, floats(count, 2)), first(fake, rank, floats(count, 0)),
        second(fake, rank, floats(count, 0));
    UserStream one(fake, rank), two(fake, rank);
    for (UserStream* stream : {&one, &two}) stream->hold(true);
    one.copy(first, source);
    two.copy(second, source);
    const srt_request requests[] = {in_place(SRT_ALLREDUCE, "1", first, count, rank, one.number()),
                                    in_place(SRT_ALLREDUCE, "2", second, count, rank, two.number())};
    Ticket handles[2];
    expect_ok(context.enqueue(requests, 2, handles));
    expect_ok(context.wait_on_stream(handles, 2, one.number(), patience));
    waits.arrive_and_wait();
    one.hold(false);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK_EQUAL(context.poll(handles[0]).code(), SRT_IN_PROGRESS);  // they are one plan
    two.hold(false);
    expect_ok(context.wait(handles, 2, patience));
    for (OnGpu* data : {&first, &second}) CHECK_EQUAL(wrong_in(data->bytes(), 4), 0);
    context.release(handles, 2);
  });
}

TEST(what_a_stream_makes_late_is_what_is_reduced) {
  on_each_backend(2, [](Fake& fake, int rank, Context& context) {
    const int64_t count = 20'000;
    OnGpu source(fake, rank, floats(count, static_cast<float>(rank + 1))), data(fake, rank, floats(count, 0));
    UserStream stream(fake, rank);
    stream.hold(true);
    stream.copy(data, source);
    const srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, rank, stream.number());
    const Ticket handle = start(context, request);
    stream.hold(false);
    expect_ok(context.wait(&handle, 1, patience));
    CHECK_EQUAL(wrong_in(data.bytes(), 3), 0);
    context.release(&handle, 1);
  });
}

// TensorFlow does not tell its streams.
TEST(an_input_may_be_made_by_any_stream) {
  on_each_backend(2, [](Fake& fake, int rank, Context& context) {
    const int64_t count = 1000;
    OnGpu made(fake, rank, floats(count, 2)), data(fake, rank, floats(count, 1));
    UserStream idle(fake, rank), busy(fake, rank);
    busy.hold(true);
    busy.copy(data, made);
    srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, rank);
    request.flags |= SRT_REQUEST_AFTER_ALL_STREAMS;
    Ticket handle = 0;
    expect_ok(context.enqueue(&request, 1, &handle));
    CHECK_EQUAL(context.wait(&handle, 1, milliseconds(50)).code(), SRT_IN_PROGRESS);
    busy.hold(false);
    expect_ok(context.wait(&handle, 1, patience));
    CHECK_EQUAL(wrong_in(data.bytes(), 4), 0);
    context.release(&handle, 1);
  });
}

TEST(a_driver_without_events_of_all_streams_is_told) {
  Fake fake(2, fake_folder + "/older");
  World ranks(2, on_gpus());
  ranks.run([&](int rank, Context& context) {
    OnGpu data(fake, rank, floats(1, 1));
    const int64_t count = 1;
    srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, rank);
    request.flags |= SRT_REQUEST_AFTER_ALL_STREAMS;
    Ticket handle = 0;
    const Status status = context.enqueue(&request, 1, &handle);
    CHECK_EQUAL(status.code(), SRT_UNSUPPORTED);
    CHECK(contains(status.text(), "12.5 or later"));
  });
}

TEST(a_stream_waits_for_what_comes) {
  on_each_backend(2, [](Fake& fake, int rank, Context& context) {
    const int64_t count = 20'000;
    OnGpu data(fake, rank, floats(count, 0)), copied(fake, rank, floats(count, 0));
    std::vector<OnGpu> sources;
    for (int step = 0; step < 20; ++step) sources.emplace_back(fake, rank, floats(count, static_cast<float>(step)));
    UserStream stream(fake, rank);
    for (int step = 0; step < 20; ++step) {
      stream.copy(data, sources[static_cast<size_t>(step)]);
      const srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, rank, stream.number());
      const Ticket handle = start(context, request);  // reuses the name and memory of the previous step
      expect_ok(context.wait_on_stream(&handle, 1, stream.number(), patience));
      context.release(&handle, 1);
      stream.copy(copied, data);
      if (step % 4) continue;
      stream.finish();
      CHECK_EQUAL(wrong_in(copied.bytes(), static_cast<float>(2 * step)), 0);
    }
  });
}

TEST(an_operation_of_a_single_rank_is_launched_although_nobody_waits) {
  Fake fake;
  World ranks(1, on_gpus({{"gpu_backend", "nccl"}}));
  ranks.run([&](int rank, Context& context) {
    GpuSum sum(fake, rank, "x", 1000);
    UserStream stream(fake, rank);
    stream.hold(true);
    const Ticket handle = start(context, sum.in(stream));
    stream.hold(false);
    const Nanoseconds end = now() + patience;
    while (fake.calls("ncclKernel") == 0 && now() < end) std::this_thread::yield();
    CHECK_EQUAL(fake.calls("ncclKernel"), 1);
    expect_ok(context.wait(&handle, 1, patience));
    context.release(&handle, 1);
  });
}

// A capture forbids queries and allocations to the engine's thread, too, unless that thread says otherwise.
TEST(a_graph_that_the_program_captures_is_not_disturbed) {
  on_each_backend(2, [](Fake& fake, int rank, Context& context) {
    fake.set("capturing", 1);
    const int64_t count = 20'000, few = 10;
    OnGpu data(fake, rank, floats(count, 1)), part(fake, rank, floats(few, 1));
    UserStream stream(fake, rank);
    stream.hold(true);
    srt_request requests[] = {in_place(SRT_ALLREDUCE, "sum", data, count, rank, stream.number()),
                              in_place(SRT_ALLREDUCE, "scaled", part, few, rank, stream.number())};
    requests[1].prescale = 0.5;
    Ticket handles[2];
    expect_ok(context.enqueue(requests, 2, handles));
    stream.hold(false);
    expect_ok(context.wait(handles, 2, patience));
    CHECK_EQUAL(wrong_in(data.bytes(), 2), 0);
    context.release(handles, 2);
  });
}

TEST(the_host_does_not_wait_for_the_gpus) {
  Fake fake;
  fake.set("hang", 1);
  Options options = on_gpus();
  options.shut_down = false;
  World ranks(2, options);
  std::barrier seen(2);
  std::vector<std::unique_ptr<OnGpu>> data;
  for (int rank = 0; rank < 2; ++rank) data.push_back(std::make_unique<OnGpu>(fake, rank, floats(100, 1)));
  ranks.run([&](int rank, Context& context) {
    const int64_t count = 100;
    UserStream stream(fake, rank);
    const srt_request request =
        in_place(SRT_ALLREDUCE, "x", *data[static_cast<size_t>(rank)], count, rank, stream.number());
    const Ticket handle = start(context, request);
    expect_ok(context.wait_on_stream(&handle, 1, stream.number(), patience));
    CHECK_EQUAL(context.poll(handle).code(), SRT_IN_PROGRESS);  // the kernel never ends
    seen.arrive_and_wait();
    if (rank == 0) context.abort("enough");
    CHECK_EQUAL(context.wait(&handle, 1, patience).code(), SRT_ABORTED);
    stream.finish();  // the abort has released the stream
  });
}

TEST(a_watched_operation_is_reported_once_it_is_launched) {
  Fake fake;
  fake.set("hang", 1);
  Options options = on_gpus();
  options.shut_down = false;
  World ranks(2, options);
  std::barrier seen(2);
  std::vector<std::unique_ptr<OnGpu>> data;
  for (int rank = 0; rank < 2; ++rank) data.push_back(std::make_unique<OnGpu>(fake, rank, floats(100, 1)));
  ranks.run([&](int rank, Context& context) {
    const int64_t count = 100;
    UserStream stream(fake, rank);
    const srt_request request =
        in_place(SRT_ALLREDUCE, "x", *data[static_cast<size_t>(rank)], count, rank, stream.number());
    Ticket handle, reported = 0;
    int32_t reports = 0;
    expect_ok(context.enqueue(&request, 1, &handle));
    expect_ok(context.watch(&handle, 1));
    expect_ok(context.wait_watched(&reported, 1, reports, patience));
    CHECK_EQUAL(reported, handle);
    CHECK_EQUAL(context.poll(handle).code(), SRT_IN_PROGRESS);  // the kernel never ends
    seen.arrive_and_wait();
    if (rank == 0) context.abort("enough");
    CHECK_EQUAL(context.wait(&handle, 1, patience).code(), SRT_ABORTED);
    CHECK_EQUAL(context.wait_watched(&reported, 1, reports, patience).code(), SRT_ABORTED);  // it is not reported again
  });
}

TEST(outputs_of_the_core_are_used_again_once_their_stream_is_past_them) {
  on_each_backend(3, [](Fake& fake, int rank, Context& context) {
    UserStream idle(fake, rank), busy(fake, rank);
    const int64_t count = 500;
    OnGpu input(fake, rank, floats(count, static_cast<float>(rank)));
    std::vector<OnGpu> kept;
    for (int step = 0; step < 12; ++step) {
      srt_request gather = on_gpu(request(SRT_ALLGATHER, "g", &count, 1), rank, idle.number());
      gather.input = input.address();
      const Ticket handle = start(context, gather);
      expect_ok(context.wait_on_stream(&handle, 1, busy.number(), patience));
      srt_tensor output{};
      expect_ok(context.output(handle, output));
      CHECK_EQUAL(output.shape[0], 3 * count);
      kept.emplace_back(fake, rank, std::vector<uint8_t>(output.bytes));
      CHECK_EQUAL(output.bytes, kept.back().bytes().size());
      busy.hold(step % 3 != 0);
      const GpuDevice::Scope scope(&busy.device());
      CHECK_EQUAL(busy.device().cuda().copy(kept.back().address(), output.data, output.bytes, busy.get()), 0);
      context.release(&handle, 1);
    }
    busy.hold(false);
    busy.finish();
    for (OnGpu& each : kept) {
      const std::vector<float> values = values_in<float>(each.bytes());
      for (size_t i = 0; i < values.size(); i += 99) CHECK_EQUAL(values[i], static_cast<float>(i / 500));
    }
  });
}

TEST(sets_that_overlap_under_random_timing) {
  on_each_backend(4, [](Fake& fake, int rank, Context& context) {
    const std::vector<std::vector<int64_t>> members{{0, 1, 2, 3}, {0, 1}, {1, 2}, {2, 3}, {0, 1, 3}};
    std::vector<int32_t> sets{0};
    for (size_t i = 1; i < members.size(); ++i) sets.push_back(add_set(context, members[i]));
    UserStream one(fake, rank), two(fake, rank);
    std::mt19937 random(static_cast<unsigned>(rank));
    const int64_t count = 700;
    for (int step = 0; step < 6; ++step) {
      std::vector<size_t> mine;
      for (size_t i = 0; i < sets.size(); ++i)
        if (std::find(members[i].begin(), members[i].end(), rank) != members[i].end()) mine.push_back(i);
      std::shuffle(mine.begin(), mine.end(), random);
      std::vector<OnGpu> data;
      std::vector<Ticket> handles;
      for (size_t i : mine) {
        data.emplace_back(fake, rank, floats(count, static_cast<float>(rank + 1)));
        srt_request request =
            in_place(SRT_ALLREDUCE, "x", data.back(), count, rank, (random() % 2 ? one : two).number());
        request.process_set = sets[i];
        expect_ok(context.enqueue(&request, 1, &handles.emplace_back()));
        if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      }
      expect_ok(context.wait(handles.data(), static_cast<int>(handles.size()), patience));
      for (size_t i = 0; i < mine.size(); ++i) {
        int64_t sum = 0;
        for (int64_t member : members[mine[i]]) sum += member + 1;
        CHECK_EQUAL(wrong_in(data[i].bytes(), static_cast<float>(sum)), 0);
      }
      context.release(handles.data(), static_cast<int>(handles.size()));
    }
  });
}

TEST(a_rank_that_has_joined_gives_neutral_elements) {
  on_each_backend(3, [](Fake& fake, int rank, Context& context) {
    const std::vector<int64_t> counts{300, 30'000};
    for (int step = 0; step <= rank; ++step)
      for (const int op : {SRT_SUM, SRT_MIN, SRT_PRODUCT}) {
        std::vector<OnGpu> data;
        std::vector<srt_request> requests;
        for (const int64_t& count : counts) {
          data.emplace_back(fake, rank, floats(count, 2));
          requests.push_back(in_place(SRT_ALLREDUCE, count > 1000 ? "large" : "small", data.back(), count, rank));
          requests.back().reduce_op = op;
        }
        Ticket handles[2];
        expect_ok(context.enqueue(requests.data(), 2, handles));
        expect_ok(context.wait(handles, 2, patience));
        const int left = 3 - step;
        const float expected = op == SRT_SUM   ? 2.0f * static_cast<float>(left)
                               : op == SRT_MIN ? 2.0f
                                               : static_cast<float>(1 << left);
        for (OnGpu& tensor : data) CHECK_EQUAL(wrong_in(tensor.bytes(), expected), 0);
        context.release(handles, 2);
      }
    run_well(context, request(SRT_JOIN, nullptr, nullptr, 0),
             [&](Ticket handle) { CHECK_EQUAL(context.result_number(handle), 2); });
  });
}

TEST(an_average_may_be_that_of_the_ranks_that_have_not_joined) {
  for (const char* backend : {"auto", "staged"}) {
    Fake fake;
    World ranks(3, on_gpus({{"gpu_backend", backend}, {"join_average", "contributors"}}));
    ranks.run([&](int rank, Context& context) {
      for (int step = 0; step <= rank; ++step) {  // with 3, 2 and 1 ranks
        GpuSum sum(fake, rank, "x", 300, static_cast<float>(2 * rank));
        sum.request.reduce_op = SRT_AVERAGE;
        run_well(context, sum.request);
        CHECK_EQUAL(wrong_in(sum.data.bytes(), static_cast<float>(2 + step)), 0);
      }
      run_well(context, request(SRT_JOIN, nullptr, nullptr, 0));
    });
  }
}

TEST(a_rank_joins_without_having_used_a_gpu) {
  on_each_backend(3, [](Fake& fake, int rank, Context& context) {
    if (rank > 0) {
      GpuSum sum(fake, rank, "x", 300, 2);
      run_well(context, sum.request);
      CHECK_EQUAL(wrong_in(sum.data.bytes(), 4), 0);
    }
    run_well(context, request(SRT_JOIN, nullptr, nullptr, 0));
  });
}

TEST(a_join_comes_after_what_is_not_ready_yet) {
  on_each_backend(2, [](Fake& fake, int rank, Context& context) {
    GpuSum sum(fake, rank, "x", 300);
    UserStream stream(fake, rank);
    stream.hold(true);
    Ticket handles[2];
    expect_ok(context.enqueue(&sum.in(stream), 1, &handles[0]));
    const srt_request join = world::request(SRT_JOIN, nullptr, nullptr, 0);
    expect_ok(context.enqueue(&join, 1, &handles[1]));
    context.flush();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK_EQUAL(context.poll(handles[1]).code(), SRT_IN_PROGRESS);
    stream.hold(false);
    expect_ok(context.wait(handles, 2, patience));
    CHECK_EQUAL(wrong_in(sum.data.bytes(), 2), 0);
    context.release(handles, 2);
  });
}

TEST(a_call_leaves_the_context_and_the_capture_mode_of_its_thread) {
  on_each_backend(2, [](Fake& fake, int rank, Context& context) {
    const UserStream other(fake, 3), own(fake, rank);
    const int64_t count = 1000;
    OnGpu data(fake, rank, floats(count, 1)), input(fake, rank, floats(count, 1));
    const GpuDevice::Scope is_current(&other.device());
    const auto is_as_before = [&](const Status& status) {
      expect_ok(status);
      int mode = cuda_capture_relaxed;
      CHECK_EQUAL(std::string(fake.pushed()), "3");
      CHECK_EQUAL(other.device().cuda().exchange_capture_mode(&mode), cuda_success);
      CHECK_EQUAL(mode, cuda_capture_relaxed);  // that of the scope above
    };
    srt_request requests[] = {in_place(SRT_ALLREDUCE, "x", data, count, rank, own.number()),
                              on_gpu(request(SRT_ALLGATHER, "g", &count, 1), rank, own.number())};
    requests[1].input = input.address();
    Ticket handles[2], reported = 0;
    int32_t gpu = -1, reports = 0;
    srt_tensor output{};
    is_as_before(context.gpu_of(data.address(), gpu));
    is_as_before(context.enqueue(requests, 2, handles));
    is_as_before(context.watch(handles, 2));
    is_as_before(context.wait_watched(&reported, 1, reports, patience));
    is_as_before(context.wait_on_stream(handles, 2, own.number(), patience));
    std::ignore = context.poll(handles[0]);
    is_as_before(context.output(handles[1], output));
    is_as_before(context.wait(handles, 2, patience));
    context.release(handles, 2);
    context.flush();
    is_as_before(context.poll(handles[0]).code() == SRT_INVALID_ARGUMENT ? Status::ok() : Status(SRT_INTERNAL, "kept"));
  });
}

TEST(a_full_gpu_frees_what_the_core_keeps_for_later) {
  Fake fake;
  fake.set("memory", 3 << 20);
  const GpuLibraries libraries(Fake::config());
  std::unique_ptr<Gpu> gpu;
  CHECK(Gpu::open(libraries, 0, gpu).is_ok());
  MemoryBlock first, second, large;
  expect_ok(gpu->memory().take(1 << 20, first));
  expect_ok(gpu->memory().take(1 << 20, second));
  CHECK_EQUAL(gpu->memory().take(2 << 20, large).code(), SRT_OUT_OF_MEMORY);
  first = MemoryBlock();
  second = MemoryBlock();
  expect_ok(gpu->memory().take(2 << 20, large));
  CHECK_EQUAL(fake.calls("cuMemFree_v2"), 2);
}

TEST(one_rank_works_on_one_gpu) {
  Fake fake;
  World ranks(1, on_gpus());
  ranks.run([&](int, Context& context) {
    const int64_t count = 10;
    OnGpu first(fake, 0, floats(count, 1)), second(fake, 1, floats(count, 1));
    run_well(context, in_place(SRT_ALLREDUCE, "x", first, count, 0));
    const Status refused = end_of(context, in_place(SRT_ALLREDUCE, "y", second, count, 1));
    CHECK_EQUAL(refused.code(), SRT_INVALID_ARGUMENT);
    CHECK(contains(refused, "set_device"));
    run_well(context, in_place(SRT_ALLREDUCE, "x", first, count, 0));
  });
}

TEST(nothing_is_opened_for_tensors_of_the_host) {
  Fake fake;
  World ranks(2, on_gpus());
  ranks.run([&](int, Context& context) { run_well(context, FloatSum("x").request); });
  CHECK_EQUAL(fake.calls("cuInit"), 0);
}
