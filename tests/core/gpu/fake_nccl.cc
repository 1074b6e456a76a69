// Tests of the fake libnccl in tests/fake_gpu: it does what NCCL promises, and no more.
#include "fake_gpu_fixture.h"

using namespace fixture;

TEST(collectives_give_exact_results_to_all_ranks) {
  Fakes fakes;
  run_ranks(fakes, 3, [](int rank, TestGpu& gpu, TestCommunicator& communicator) {
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

TEST(parts_are_gathered_and_scattered_also_in_place) {
  Fakes fakes;
  run_ranks(fakes, 3, [](int rank, TestGpu& gpu, TestCommunicator& communicator) {
    const auto number = static_cast<float>(rank + 1);
    const NcclFunctions& nccl = communicator.nccl;
    const DeviceArray<float> part(gpu, {number, -number}), all(gpu, {0, 0, 0, 0, 0, 0});
    nccl.allgather(part.data(), all.data(), 2, float32, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    CHECK_EQUAL(all.get(), std::vector<float>({1, -1, 2, -2, 3, -3}));
    nccl.reducescatter(all.data(), part.data(), 2, float32, sum, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    CHECK_EQUAL(part.get(), std::vector<float>({3 * number, -3 * number}));
    float* const own = all.data() + 2 * rank;
    nccl.reducescatter(all.data(), own, 2, float32, sum, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    nccl.allgather(own, all.data(), 2, float32, communicator.handle, gpu.stream);
    finish(gpu, communicator);
    CHECK_EQUAL(all.get(), std::vector<float>({3, -3, 6, -6, 9, -9}));
  });
}

TEST(a_group_is_launched_at_its_end_and_exchanges_at_once) {
  Fakes fakes;
  run_ranks(fakes, 4, [&](int rank, TestGpu& gpu, TestCommunicator& communicator) {
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
  run_ranks(fakes, 2, [](int rank, TestGpu& gpu, TestCommunicator& communicator) {
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
  run_ranks(fakes, 2, [](int rank, TestGpu& gpu, TestCommunicator& communicator) {
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
  run_ranks(fakes, 2, [](int, TestGpu& gpu, TestCommunicator& communicator) {
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

// A free of memory waits for all kernels on the GPU.
TEST(an_abort_waits_for_the_kernels_of_other_communicators_unless_they_are_aborted_in_the_same_group) {
  for (const bool is_grouped : {false, true}) {
    Fakes fakes;
    fakes.control.set("hang", 1);
    fakes.control.set("free_limit", is_grouped ? 20'000 : 20);
    NcclUniqueId other;
    OK(fakes.nccl().unique_id(&other));
    run_ranks(fakes, 2, [&](int rank, TestGpu& gpu, TestCommunicator& first) {
      TestCommunicator second(fakes, 2, other, rank);
      const DeviceArray<float> array(gpu, {1}), more(gpu, {1});
      const NcclFunctions& nccl = first.nccl;
      nccl.allreduce(array.data(), array.data(), 1, float32, sum, first.handle, gpu.stream);
      OK(first.settle());
      nccl.allreduce(more.data(), more.data(), 1, float32, sum, second.handle, gpu.stream);
      OK(second.settle());
      if (is_grouped) OK(nccl.group_start());
      first.abort();
      second.abort();
      if (is_grouped) OK(nccl.group_end());
      gpu.wait(gpu.record());
    });
    if (!is_grouped)
      CHECK_EQUAL(fakes.take_misuse(), "ncclCommAbort: it waits for another communicator's kernel, which does not end");
  }
}

TEST(a_kernel_comes_after_the_tasks_that_make_its_inputs_and_before_those_that_use_its_outputs) {
  Fakes fakes;
  run_ranks(fakes, 1, [&](int, TestGpu& gpu, TestCommunicator& communicator) {
    CudaStream launches = nullptr;
    OK(gpu.cuda.stream_create(&launches, cuda_stream_non_blocking, 0));
    const DeviceArray<float> source(gpu, {1}), input(gpu, {0}), output(gpu, {0});
    const auto reduce = [&] {
      communicator.nccl.allreduce(input.data(), output.data(), 1, float32, sum, communicator.handle, launches);
      OK(communicator.settle());
    };
    const auto wait_in = [&](CudaStream stream, CudaEvent event) {
      OK(gpu.cuda.stream_wait_event(stream, event, 0));
      OK(gpu.cuda.event_destroy(event));
    };
    const auto after_launches = [&] {
      CudaEvent event = nullptr;
      OK(gpu.cuda.event_create(&event, cuda_event_disable_timing));
      OK(gpu.cuda.event_record(event, launches));
      return event;
    };
    OK(gpu.cuda.copy(input.memory, source.memory, 4, gpu.stream));
    wait_in(launches, gpu.record());
    const CudaEvent early = after_launches();
    reduce();
    wait_in(gpu.stream, after_launches());
    OK(gpu.cuda.copy(source.memory, output.memory, 4, gpu.stream));
    CHECK_EQUAL(std::string(fakes.control.misuse()), "");
    OK(gpu.cuda.copy(input.memory, source.memory, 4, gpu.stream));
    CHECK(fakes.control.await_tasks(nullptr, 60));  // no access is a race of the test's own
    reduce();
    std::string found = fakes.take_misuse();
    CHECK(found.starts_with("ncclAllReduce (task ") && found.ends_with("writes"));
    CHECK(contains(found, "reads: the same memory, in no order with it: cuMemcpyAsync (task "));
    gpu.wait(after_launches());
    gpu.wait(gpu.record());
    reduce();
    wait_in(gpu.stream, early);  // recorded before the launch
    CHECK(fakes.control.await_tasks(nullptr, 60));
    OK(gpu.cuda.copy(source.memory, output.memory, 4, gpu.stream));
    found = fakes.take_misuse();
    CHECK(contains(found, "reads: the same memory, in no order with it: ncclAllReduce (task "));
    gpu.wait(after_launches());
    gpu.wait(gpu.record());
    OK(gpu.cuda.stream_destroy(launches));
  });
}

TEST(an_id_serves_for_one_communicator) {
  Fakes fakes;
  NcclUniqueId id;
  OK(fakes.nccl().unique_id(&id));
  const TestGpu gpu(fakes, 0);
  {
    const TestCommunicator first(fakes, 1, id, 0);
    CHECK_EQUAL(first.state, nccl_success);
  }
  NcclConfig config;
  NcclCommunicator again = nullptr;
  CHECK_EQUAL(fakes.nccl().init(&again, 1, id, 0, &config), invalid_argument);
  CHECK_EQUAL(fakes.take_misuse(), "ncclCommInitRankConfig: the rank is there already");
  OK(fakes.nccl().abort(again));
}

TEST(a_communicator_ends_when_all_ranks_let_it) {
  Fakes fakes;
  std::atomic<bool> may_leave = false;
  run_ranks(fakes, 2, [&](int rank, TestGpu&, TestCommunicator& communicator) {
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
  run_ranks(fakes, 1, [&](int, TestGpu&, TestCommunicator& communicator) {
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
  run_ranks(fakes, 1, [&](int, TestGpu& gpu, TestCommunicator& communicator) {
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

TEST(a_part_that_overlaps_the_whole_elsewhere_is_noticed) {
  Fakes fakes;
  run_ranks(fakes, 2, [&](int rank, TestGpu& gpu, TestCommunicator& communicator) {
    const DeviceArray<float> all(gpu, {0, 0, 0, 0});
    const NcclFunctions& nccl = communicator.nccl;
    float* const others = all.data() + 2 * (1 - rank);
    CHECK_EQUAL(nccl.allgather(others, all.data(), 2, float32, communicator.handle, gpu.stream), invalid_argument);
    CHECK_EQUAL(nccl.reducescatter(all.data(), all.data() + 1, 2, float32, sum, communicator.handle, gpu.stream),
                invalid_argument);
  });
  CHECK(contains(fakes.take_misuse(), "is not this rank's part of the larger"));
}

TEST(ranks_share_a_gpu_only_where_nccl_lets_them) {
  Fakes fakes;
  const auto state_with = [&](int version) {
    fakes.control.set("nccl_version", version);
    NcclUniqueId id;
    OK(fakes.nccl().unique_id(&id));
    NcclResult states[2] = {};
    const auto join = [&](int rank) {
      const TestGpu gpu(fakes, 0);
      const TestCommunicator communicator(fakes, 2, id, rank);
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

TEST(ranks_that_name_two_hosts_share_a_gpu) {
  Fakes fakes;
  const TestGpu gpu(fakes, 0);
  const NcclFunctions& nccl = fakes.nccl();
  const auto state_with = [&](const std::array<const char*, 2>& host_ids) {
    NcclUniqueId id;
    OK(nccl.unique_id(&id));
    NcclCommunicator communicators[2] = {};
    for (int rank = 0; rank < 2; ++rank) {
      ::setenv("NCCL_HOSTID", host_ids[static_cast<size_t>(rank)], 1);
      NcclConfig config;
      CHECK_EQUAL(nccl.init(&communicators[rank], 2, id, rank, &config), nccl_in_progress);
    }
    ::unsetenv("NCCL_HOSTID");
    NcclResult state = nccl_in_progress;
    while (nccl.async_error(communicators[0], &state) == nccl_success && state == nccl_in_progress)
      std::this_thread::yield();
    for (NcclCommunicator communicator : communicators) OK(nccl.abort(communicator));
    return state;
  };
  CHECK_EQUAL(state_with({"one", "one"}), invalid_usage);
  CHECK_EQUAL(state_with({"one", "two"}), nccl_success);
}
