// Calls of compiled programs whose arrays are on GPUs of the fake libraries: the stream waits, and not the host.
#include <thread>

#include "gpu/gpu_world.h"
#include "xla/on_stream.h"
#include "xla_program.h"

using namespace program;

namespace {

// Runs one rank's program on its GPU, in a stream of its own; returns "" or the error.
std::string run(srt_context* context, Step& step, world::UserStream& stream) {
  step.context.stream = stream.get();
  const XlaCallFrame frame = step.frame();
  XlaCall call;
  CallStatus status = XlaCall::read(frame, call);
  if (status.is_ok()) status = run_on_stream(context, frame, std::move(call));
  stream.finish();
  return status.text;
}

void on_two_gpus(const char* backend, const std::function<void(int, srt_context*, world::Fake&)>& body) {
  world::Fake fake(2);
  Ranks ranks(2, world::on_gpus({{"gpu_backend", backend}}, world::Over::sockets));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) threads.emplace_back([&, rank] { body(rank, ranks[rank], fake); });
  for (std::thread& thread : threads) thread.join();
}

XlaBuffer buffer(const world::OnGpu& memory, int64_t& count) {
  return {sizeof(XlaBuffer), nullptr, XlaDataType::f32, reinterpret_cast<void*>(memory.address()), 1, &count};
}

}  // namespace

TEST(arrays_on_gpus_are_summed_and_gathered_in_the_programs_stream) {
  for (const char* backend : {"nccl", "staged"})
    on_two_gpus(backend, [](int rank, srt_context* context, world::Fake& fake) {
      const auto own = static_cast<float>(rank + 1);
      world::UserStream stream(fake, rank);
      world::OnGpu data(fake, rank, world::bytes_of<float>({own, 10 * own}));
      world::OnGpu all(fake, rank, world::bytes_of<float>({0, 0, 0, 0}));
      int64_t two = 2, four = 4;
      Step sum(SRT_ALLREDUCE, "sum"), gather(SRT_ALLGATHER, "rows", 2);
      gather.add(buffer(data, two), buffer(all, four));
      CHECK_EQUAL(run(context, gather, stream), "");
      CHECK_EQUAL(world::values_in<float>(all.bytes()), (std::vector<float>{1, 10, 2, 20}));
      sum.add(buffer(data, two), buffer(data, two));
      sum.integers["ends_step"] = 1;
      CHECK_EQUAL(run(context, sum, stream), "");
      CHECK_EQUAL(steps_of(context), 1);
      CHECK_EQUAL(world::values_in<float>(data.bytes()), (std::vector<float>{3, 30}));
    });
}

TEST(programs_of_other_shapes_are_told_apart_on_gpus) {
  on_two_gpus("nccl", [](int rank, srt_context* context, world::Fake& fake) {
    world::UserStream stream(fake, rank);
    world::OnGpu data(fake, rank, world::bytes_of<float>({1, 2}));
    int64_t count = rank + 1;
    Step sum(SRT_ALLREDUCE, "sum");
    sum.integers["ends_step"] = 1;
    sum.add(buffer(data, count), buffer(data, count));
    CHECK(contains(run(context, sum, stream), "ranks disagree about 'sum'"));
    CHECK_EQUAL(steps_of(context), 0);
  });
}

// As in an elastic job: a step must not continue with arrays that have not arrived.
TEST(a_program_fails_with_a_collective_that_fails_after_its_launch_if_the_host_waits) {
  std::vector<std::string> ends(2);
  world::Fake fake(2);
  fake.set("hang", 1);
  Ranks ranks(2, world::on_gpus({{"gpu_backend", "nccl"}}, world::Over::sockets));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      srt_wait_on_host(ranks[rank]);
      world::UserStream stream(fake, rank);
      world::OnGpu data(fake, rank, world::bytes_of<float>({1, 2}));
      int64_t count = 2;
      Step sum(SRT_ALLREDUCE, "sum");
      sum.add(buffer(data, count), buffer(data, count));
      ends[static_cast<size_t>(rank)] = run(ranks[rank], sum, stream);
      CHECK_EQUAL(world::values_in<float>(data.bytes()), (std::vector<float>{1, 2}));
    });
  while (fake.calls("ncclAllReduce") < 2) std::this_thread::yield();
  srt_abort(ranks[0], "a peer is gone");
  for (std::thread& thread : threads) thread.join();
  for (const std::string& end : ends) CHECK(contains(end, "a peer is gone"));
}
