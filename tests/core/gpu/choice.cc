// The ranks' choice between NCCL and staging, and the log's line about it.
#include <barrier>

#include "gpu_world.h"

using namespace world;

TEST(two_ranks_on_one_gpu_go_through_the_host) {
  Fake fake;
  const Said said;
  World ranks(3, saying(said));
  ranks.run([&](int rank, Context& context) {
    for (int i = 0; i < 2; ++i) expect_ok(step(fake, context, rank / 2));
  });
  CHECK_EQUAL(said.times("go through the memory of the host"), 1);
  CHECK_EQUAL(said.times("rank 0 (pid 100 on here) and rank 1 (pid 101 on here) work on one GPU"), 1);
  CHECK_EQUAL(fake.calls("ncclCommInitRankConfig"), 0);
}

TEST(two_parts_of_one_gpu_go_through_the_host) {
  Fake fake;
  fake.set("parts", 2);
  const Said said;
  World ranks(2, saying(said));
  ranks.run([&](int rank, Context& context) { expect_ok(step(fake, context, rank)); });
  CHECK_EQUAL(said.times("work on one GPU"), 1);
}

TEST(two_containers_that_share_a_gpu_go_through_the_host) {
  Fake fake;
  const Said said;
  Options options = saying(said);
  options.hosts = {0, 1};
  World ranks(2, std::move(options));
  ranks.run([&](int, Context& context) { expect_ok(step(fake, context, 0)); });
  CHECK_EQUAL(said.times("work on one GPU"), 1);
  CHECK_EQUAL(fake.calls("ncclCommInitRankConfig"), 0);
}

TEST(an_environment_that_makes_nccl_block_is_reported) {
  Fake fake;
  const Said said;
  ::setenv("NCCL_COMM_BLOCKING", "1", 1);
  {
    World ranks(2, saying(said));
    ranks.run([&](int rank, Context& context) { expect_ok(step(fake, context, rank)); });
  }
  ::unsetenv("NCCL_COMM_BLOCKING");
  CHECK_EQUAL(said.times("NCCL_COMM_BLOCKING=1 is set"), 1);
}

TEST(versions_that_differ_are_told) {
  Fake fake;
  const Said said;
  World ranks(2, saying(said));
  std::barrier opened(2);
  ranks.run([&](int rank, Context& context) {
    if (rank == 1) opened.arrive_and_wait();
    GpuSum sum(fake, rank, "x");
    const Ticket handle = start(context, sum.request);
    if (rank == 0) fake.set("nccl_version", 22304);
    if (rank == 0) opened.arrive_and_wait();
    expect_ok(context.wait(&handle, 1, patience));
  });
  CHECK_EQUAL(said.times("has NCCL 2.28.3 and rank 1 (pid 101 on here) has NCCL 2.23.4"), 1);
}

TEST(without_nccl_it_is_staged_or_refused) {
  Fake fake;
  fake.set("nccl_version", 21805);
  const Said said;
  {
    World ranks(2, saying(said));
    ranks.run([&](int rank, Context& context) { expect_ok(step(fake, context, rank)); });
  }
  CHECK_EQUAL(said.times("go through the memory of the host"), 1);
  World ranks(2, on_gpus({{"gpu_backend", "nccl"}}));
  ranks.run([&](int rank, Context& context) {
    const Status ending = step(fake, context, rank);
    CHECK_EQUAL(ending.code(), SRT_DEVICE);
    CHECK(contains(ending, "gpu_backend is nccl"));
  });
}

TEST(nccl_is_not_used_between_hosts_where_connections_are_encrypted) {
  Fake fake;
  const Said said;
  Options options = saying(said, {{"encrypt", "1"}});
  options.hosts = {0, 1};
  World ranks(2, std::move(options));
  ranks.run([&](int rank, Context& context) { expect_ok(step(fake, context, rank)); });
  CHECK_EQUAL(said.times("NCCL does not encrypt what goes between the hosts of rank 0"), 1);
  CHECK_EQUAL(fake.calls("ncclCommInitRankConfig"), 0);
}

TEST(staged_uses_no_nccl) {
  Fake fake;
  const Said said;
  World ranks(2, saying(said, {{"gpu_backend", "staged"}}));
  ranks.run([&](int rank, Context& context) { expect_ok(step(fake, context, rank)); });
  CHECK_EQUAL(fake.calls("ncclGetUniqueId"), 0);
  CHECK_EQUAL(said.text(), "");
}
