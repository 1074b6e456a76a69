// Tensors on GPUs, through NCCL and staged: the results equal those of the CPU, for every kind and dtype, and in
// whatever order tensors become ready. The GPUs are fakes, which also report what CUDA and NCCL forbid.
#include <barrier>
#include <numeric>

#include "gpu_world.h"

using namespace world;

namespace {

// Returns the settings that take different ways. A single rank calls NCCL only if it is asked to.
std::vector<const char*> backends_of(int size) {
  return size > 1 ? std::vector<const char*>{"auto", "staged"} : std::vector<const char*>{"auto", "nccl", "staged"};
}

// Returns small integers, which every dtype holds exactly. A complex number has two.
std::vector<uint8_t> values(DType dtype, int64_t elements, int rank) {
  for (const auto& [complex, part] : {std::pair{DType::complex32, DType::float16},
                                      {DType::complex64, DType::float32},
                                      {DType::complex128, DType::float64}})
    if (dtype == complex) return values(part, 2 * elements, rank);
  const DTypeKernels* kernels = choose_kernels("auto").of(dtype);
  const size_t each = dtype_bytes(dtype);
  std::vector<uint8_t> bytes(each * static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) {
    uint8_t* element = bytes.data() + static_cast<size_t>(i) * each;
    const double value = dtype == DType::boolean ? static_cast<double>((i + rank) % 2) : static_cast<double>(i % 2 + 1);
    if (kernels && kernels->from_double) kernels->from_double(element, &value, 1);
    else element[0] = static_cast<uint8_t>(value);
  }
  return bytes;
}

// The same request twice: with the host's memory, and with memory of the rank's GPU. Outputs are compared byte by byte.
class Twice {
 public:
  Twice(FakeGpu& fake, int rank, srt_request request, int64_t output_elements)
      : fake_(fake), request_(request), rank_(rank) {
    int64_t elements = 1;
    for (int32_t i = 0; i < request.dimensions; ++i) elements *= request.shape[i];
    const auto dtype = static_cast<DType>(request.dtype);
    input_ = values(dtype, elements, rank);
    output_.resize(dtype_bytes(dtype) * static_cast<size_t>(output_elements) + 1);
  }

  // Returns the number of bytes that differ; -1 where an operation failed.
  int64_t difference(Context& context) {
    OnGpu input(fake_, rank_, input_), output(fake_, rank_, output_);
    srt_request both[] = {request_, on_gpu(request_, rank_)};
    const bool allocates = request_.kind == SRT_ALLGATHER || request_.kind == SRT_ALLTOALL;
    both[0].name = "on the CPU";
    both[0].input = reinterpret_cast<uintptr_t>(input_.data());
    both[0].output = allocates ? 0 : reinterpret_cast<uintptr_t>(output_.data());
    both[1].name = "on a GPU";
    both[1].input = input.address();
    both[1].output = allocates ? 0 : output.address();
    Ticket handles[2];
    if (const Status status = run(context, both, handles); !status.is_ok()) {
      check::fail(__FILE__, __LINE__, status.text());
      return -1;
    }
    if (allocates)
      return release(context, handles, output_of<uint8_t>(context, handles[0]),
                     output_of<uint8_t>(context, handles[1]));
    return release(context, handles, output_, output.bytes());
  }

 private:
  static Status run(Context& context, const srt_request* both, Ticket* handles) {
    const Status status = context.enqueue(both, 2, handles);
    return status.is_ok() ? context.wait(handles, 2, seconds(60)) : status;
  }

  static int64_t release(Context& context, const Ticket* handles, const std::vector<uint8_t>& a,
                         const std::vector<uint8_t>& b) {
    context.release(handles, 2);
    int64_t different = std::ssize(a) - std::ssize(b);
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) different += a[i] != b[i];
    return different;
  }

  FakeGpu& fake_;
  srt_request request_;
  int rank_;
  std::vector<uint8_t> input_, output_;
};

int64_t difference(FakeGpu& fake, Context& context, int rank, srt_request request, int64_t output_elements) {
  return Twice(fake, rank, request, output_elements).difference(context);
}

// Row counts that are small enough to be fused, and large enough to be transferred without a copy.
const std::vector<int64_t> row_counts{5, 9001};

// Runs the body over shared memory, over sockets, and on two hosts. It is given a turn: with each size and backend,
// the three ways of connection have the turns 0 to 2, in another order for the next size: with three sizes in a row of
// several ranks, each has all turns. With sanitizers it runs on the last size only.
void in_turns(Fake& fake, const std::vector<int>& sizes,
              const std::function<void(int rank, int size, int turn, Context&)>& body) {
  for (int size : check::of(sizes))
    for (const char* backend : backends_of(size)) {
      int turn = size;
      for (Options options : everywhere(size, {{"gpu_backend", backend}, {"gpu_libraries", fake_folder}})) {
        fake.set("seed", size);
        options.knobs.emplace_back("log_descriptor", "-1");
        World ranks(size, options);
        ranks.run([&](int rank, Context& context) { body(rank, size, turn % 3, context); });
        ++turn;
      }
    }
}

void on_each_gpu(Fake& fake, const std::vector<int>& sizes, const std::function<void(int, int, Context&)>& body) {
  in_turns(fake, sizes, [&](int rank, int size, int, Context& context) { body(rank, size, context); });
}

// Gathers or scatters tensors of so many elements as one group, on three ranks. Returns the number of wrong elements.
int64_t wrong_in_fused(FakeGpu& fake, Context& context, int rank, Kind kind, const std::vector<int64_t>& counts) {
  const bool gathers = kind == Kind::allgather;
  const auto place = static_cast<size_t>(rank), size = counts.size();
  std::vector<OnGpu> inputs, outputs;
  std::vector<int64_t> shapes(size);
  std::vector<srt_request> requests(size);
  for (size_t i = 0; i < size; ++i) {
    shapes[i] = gathers ? counts[i] / 3 : counts[i];
    std::vector<float> values(static_cast<size_t>(shapes[i]));
    std::iota(values.begin(), values.end(), static_cast<float>(gathers ? values.size() * place : 0));
    inputs.emplace_back(fake, rank, bytes_of(values));
    outputs.emplace_back(fake, rank, floats(gathers ? counts[i] : counts[i] / 3, -1));
    requests[i] = on_gpu(request(static_cast<int32_t>(kind), nullptr, &shapes[i], 1), rank);
    requests[i].input = inputs[i].address();
    requests[i].output = outputs[i].address();
    requests[i].output_bytes = static_cast<int64_t>(outputs[i].bytes().size());
    requests[i].group_id = 1;
    requests[i].group_size = static_cast<int32_t>(size);
  }
  run_batch_well(context, requests);
  int64_t wrong = 0;
  for (OnGpu& output : outputs) {
    const std::vector<float> found = values_in<float>(output.bytes());
    const size_t first = gathers ? 0 : found.size() * place;
    for (size_t at = 0; at < found.size(); ++at)
      wrong += found[at] != static_cast<float>((first + at) * (gathers ? 1 : 3));
  }
  return wrong;
}

// Returns the kinds of the operations that a backend has moved, with their numbers.
std::string operations_by(Context& context, std::string_view backend) {
  srt_operation_count rows[64];
  std::string text;
  for (int32_t row = 0, count = context.count_operations(rows, 64); row < count; ++row)
    if (backend == rows[row].backend)
      text += format("%s %lld ", rows[row].kind, static_cast<long long>(rows[row].operations));
  return text;
}

}  // namespace

TEST(every_dtype_is_reduced_as_on_the_cpu) {
  Fake fake;
  in_turns(fake, {1, 2, 3, 4}, [&](int rank, int size, int turn, Context& context) {
    for (int dtype = 0; dtype < dtype_count; ++dtype)
      for (int op = SRT_SUM; op <= SRT_PRODUCT; ++op) {
        if ((dtype + op) % 3 != turn || !(dtype_entry(dtype)->reduce_ops & 1 << op)) continue;
        const int64_t shape[] = {row_counts[static_cast<size_t>(dtype + op) % 2], 3};
        srt_request request = world::request(SRT_ALLREDUCE, nullptr, shape, 2, static_cast<DType>(dtype));
        request.reduce_op = op;
        CHECK_EQUAL(difference(fake, context, rank, request, shape[0] * 3), 0);
        request.kind = SRT_REDUCESCATTER;
        const int64_t rows = rows_of_member(shape[0], static_cast<size_t>(size), static_cast<size_t>(rank));
        CHECK_EQUAL(difference(fake, context, rank, request, rows * 3), 0);
      }
  });
}

TEST(averages_of_bytes_do_not_wrap_around) {
  Fake fake;
  World ranks(2, on_gpus({{"gpu_backend", "nccl"}}));
  ranks.run([&](int rank, Context& context) {
    for (const DType dtype : {DType::int8, DType::uint8}) {
      const int64_t count = 1000;
      OnGpu data(fake, rank, std::vector<uint8_t>(count, 100));
      srt_request request = in_place(SRT_ALLREDUCE, "bytes", data, count, rank);
      request.dtype = static_cast<int32_t>(dtype);
      request.reduce_op = SRT_AVERAGE;
      run_well(context, request);
      CHECK_EQUAL(data.bytes(), std::vector<uint8_t>(count, 100));
    }
  });
}

TEST(factors_apply_as_on_the_cpu) {
  Fake fake;
  on_each_gpu(fake, {1, 2, 3}, [&](int rank, int, Context& context) {
    for (DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64, DType::complex64, DType::int32,
                        DType::int64})
      for (int op : {SRT_SUM, SRT_MAX})
        for (int64_t count : row_counts) {
          if (!(dtype_entry(static_cast<int>(dtype))->reduce_ops & 1 << op)) continue;
          srt_request request = world::request(SRT_ALLREDUCE, nullptr, &count, 1, dtype);
          request.reduce_op = op;
          request.prescale = 4.0;
          request.postscale = 0.5;
          CHECK_EQUAL(difference(fake, context, rank, request, count), 0);
        }
  });
}

TEST(factors_apply_to_an_average) {
  Fake fake;
  on_each_gpu(fake, {2, 4}, [&](int rank, int, Context& context) {
    for (int64_t count : row_counts) {
      srt_request request = world::request(SRT_ALLREDUCE, nullptr, &count, 1, DType::float32);
      request.reduce_op = SRT_AVERAGE;
      request.prescale = 4.0;
      CHECK_EQUAL(difference(fake, context, rank, request, count), 0);
    }
  });
}

TEST(every_dtype_is_moved) {
  Fake fake;
  in_turns(fake, {1, 2, 3, 4}, [&](int rank, int size, int turn, Context& context) {
    for (int dtype = 0; dtype < dtype_count; ++dtype) {
      if (dtype % 3 != turn) continue;
      const int64_t shape[] = {row_counts[static_cast<size_t>(dtype) % 2] + 7 * rank, 2};
      CHECK_EQUAL(
          difference(fake, context, rank, request(SRT_ALLGATHER, nullptr, shape, 2, static_cast<DType>(dtype)), 0), 0);
      std::vector<int64_t> splits(static_cast<size_t>(size), 1);
      splits.back() = shape[0] - (size - 1);
      srt_request exchange = request(SRT_ALLTOALL, nullptr, shape, 2, static_cast<DType>(dtype));
      CHECK_EQUAL(difference(fake, context, rank, with_splits(exchange, splits), 0), 0);
      srt_request broadcast = request(SRT_BROADCAST, nullptr, &row_counts[1], 1, static_cast<DType>(dtype));
      broadcast.root = size - 1;
      CHECK_EQUAL(difference(fake, context, rank, broadcast, row_counts[1]), 0);
      if (size == 1 || rank > 1) continue;
      srt_request send =
          request(SRT_SEND, nullptr, &row_counts[static_cast<size_t>(dtype) % 2], 1, static_cast<DType>(dtype));
      send.root = dtype % 2;
      send.destination = 1 - send.root;
      CHECK_EQUAL(difference(fake, context, rank, send, rank == send.root ? 0 : *send.shape), 0);
    }
  });
}

TEST(only_what_nccl_cannot_do_goes_through_the_host) {
  Fake fake;
  World ranks(2, on_gpus());
  std::barrier done(2);
  ranks.run([&](int rank, Context& context) {
    const auto calls_after = [&](const srt_request& request, const char* function) {
      done.arrive_and_wait();
      const int before = fake.calls(function);
      done.arrive_and_wait();
      CHECK_EQUAL(difference(fake, context, rank, request, row_counts[1]), 0);
      done.arrive_and_wait();
      return fake.calls(function) - before;
    };
    srt_request request = world::request(SRT_ALLREDUCE, nullptr, &row_counts[1], 1);
    CHECK_EQUAL(calls_after(request, "ncclAllReduce"), 2);
    CHECK_EQUAL(calls_after(request, "cuMemHostAlloc"), 0);
    request.postscale = 0.5;
    CHECK_EQUAL(calls_after(request, "ncclRedOpCreatePreMulSum"), 2);
    request.dtype = static_cast<int32_t>(DType::int32);
    CHECK_EQUAL(calls_after(request, "ncclAllReduce"), 0);
    request.postscale = 1.0;
    CHECK_EQUAL(calls_after(request, "ncclAllReduce"), 2);
    request.dtype = static_cast<int32_t>(DType::int16);
    CHECK_EQUAL(calls_after(request, "ncclAllReduce"), 0);
    request.kind = SRT_BROADCAST;
    CHECK_EQUAL(calls_after(request, "ncclBroadcast"), 2);
    CHECK_EQUAL(operations_by(context, "nccl"), "all-reduce 4 broadcast 1 ");
    CHECK_EQUAL(operations_by(context, "staged"), "all-reduce 2 ");
  });
}

TEST(a_single_rank_calls_nccl_only_if_it_is_asked_to) {
  for (const std::string backend : {"auto", "nccl"}) {
    Fake fake;
    World ranks(1, on_gpus({{"gpu_backend", backend}}));
    ranks.run([&](int rank, Context& context) {
      expect_ok(step(fake, context, rank));
      CHECK_EQUAL(operations_by(context, backend == "nccl" ? "nccl" : "single rank"), "all-reduce 2 all-gather 1 ");
    });
    const int times = backend == "nccl";
    CHECK_EQUAL(fake.calls("ncclCommInitRankConfig"), times);
    CHECK_EQUAL(fake.calls("ncclCommDestroy"), times);
    CHECK_EQUAL(fake.calls("ncclRedOpCreatePreMulSum"), times);
    CHECK_EQUAL(fake.calls("ncclAllReduce"), 2 * times);
    CHECK_EQUAL(fake.calls("ncclAllGather"), times);
  }
}

TEST(adasum_goes_through_the_host) {
  Fake fake;
  on_each_gpu(fake, {2, 3}, [&](int rank, int, Context& context) {
    srt_request request = world::request(SRT_ALLREDUCE, nullptr, &row_counts[1], 1);
    request.reduce_op = SRT_ADASUM;
    CHECK_EQUAL(difference(fake, context, rank, request, row_counts[1]), 0);
  });
}

TEST(equal_parts_of_a_tensor_go_through_one_call_without_a_copy) {
  Fake fake;
  World ranks(3, on_gpus());
  std::barrier done(3);
  ranks.run([&](int rank, Context& context) {
    const auto effect_of = [&](Kind kind, int64_t rows, DType dtype = DType::float32) {
      done.arrive_and_wait();
      const char* const functions[] = {"ncclAllGather", "ncclReduceScatter", "ncclBroadcast", "ncclReduce"};
      std::map<std::string, int> before;
      for (const char* function : functions) before[function] = fake.calls(function);
      const long long copied = fake.copied();
      done.arrive_and_wait();
      const int64_t shape[] = {rows, 2};
      const srt_request request = world::request(static_cast<int32_t>(kind), nullptr, shape, 2, dtype);
      const int64_t own = kind == Kind::allgather ? 0 : 2 * rows_of_member(rows, 3, static_cast<size_t>(rank));
      CHECK_EQUAL(difference(fake, context, rank, request, own), 0);
      done.arrive_and_wait();
      std::string effect;
      for (const char* function : functions)
        if (const int calls = fake.calls(function) - before[function]) effect += format("%d %s, ", calls, function);
      return effect + format("%lld copied", fake.copied() - copied);
    };
    for (const int64_t rows : {3, 90'000}) {
      CHECK_EQUAL(effect_of(Kind::allgather, rows), "3 ncclAllGather, 0 copied");
      CHECK_EQUAL(effect_of(Kind::reducescatter, rows), "3 ncclReduceScatter, 0 copied");
      CHECK_EQUAL(effect_of(Kind::reducescatter, rows, DType::float64), "3 ncclReduceScatter, 0 copied");
    }
    CHECK_EQUAL(effect_of(Kind::allgather, 90'000 + rank), "9 ncclBroadcast, 0 copied");
    CHECK_EQUAL(effect_of(Kind::reducescatter, 90'001), "9 ncclReduce, 0 copied");
    CHECK_EQUAL(effect_of(Kind::reducescatter, 4), "9 ncclReduce, 0 copied");
  });
}

TEST(equal_parts_of_fused_tensors_go_through_few_calls) {
  Fake fake;
  World ranks(3, on_gpus());
  std::barrier done(3);
  ranks.run([&](int rank, Context& context) {
    const std::vector<int64_t> counts{3, 60, 90'000, 9};
    const long long small = 4 * (3 + 60 + 9);  // bytes of all parts
    const long long copied = 3 * (small / 3 + small);  // by all ranks: packed, and unpacked
    CHECK_EQUAL(wrong_in_fused(fake, context, rank, Kind::allgather, counts), 0);
    done.arrive_and_wait();
    CHECK_EQUAL(fake.calls("ncclAllGather"), 3 * 2);
    CHECK_EQUAL(fake.calls("ncclBroadcast"), 0);
    CHECK_EQUAL(fake.copied(), copied);
    done.arrive_and_wait();
    CHECK_EQUAL(wrong_in_fused(fake, context, rank, Kind::reducescatter, counts), 0);
    done.arrive_and_wait();
    CHECK_EQUAL(fake.calls("ncclReduceScatter"), 3 * 2);
    CHECK_EQUAL(fake.calls("ncclReduce"), 0);
    CHECK_EQUAL(fake.copied(), 2 * copied);
  });
}

TEST(an_all_gather_may_be_in_place) {
  Fake fake;
  World ranks(2, on_gpus());
  ranks.run([&](int rank, Context& context) {
    const int64_t count = 30'000;
    OnGpu all(fake, rank, floats(2 * count, static_cast<float>(rank + 1)));
    srt_request gather = on_gpu(request(SRT_ALLGATHER, "x", &count, 1), rank);
    gather.input = all.address() + static_cast<uintptr_t>(rank * count) * sizeof(float);
    gather.output = all.address();
    gather.output_bytes = 2 * count * static_cast<int64_t>(sizeof(float));
    run_well(context, gather, [&](Ticket handle) {
      srt_tensor result{};
      CHECK(context.output(handle, result).is_ok());
      CHECK_EQUAL(result.data, all.address());
    });
    std::vector<float> expected(count, 1);
    expected.resize(2 * count, 2);
    CHECK_EQUAL(values_in<float>(all.bytes()), expected);
  });
  CHECK_EQUAL(fake.calls("ncclAllGather"), 2);
  CHECK_EQUAL(fake.copied(), 0);
}

TEST(a_rank_that_has_joined_scatters_neutral_elements) {
  Fake fake;
  World ranks(2, on_gpus());
  ranks.run([&](int rank, Context& context) {
    if (rank == 1) {
      for (const int64_t count : {int64_t{20}, int64_t{60'000}}) {
        OnGpu input(fake, rank, floats(count, 3)), output(fake, rank, floats(count / 2, 0));
        srt_request product = on_gpu(request(SRT_REDUCESCATTER, "x", &count, 1), rank);
        product.reduce_op = SRT_PRODUCT;
        product.input = input.address();
        product.output = output.address();
        run_well(context, product);
        CHECK_EQUAL(output.bytes(), floats(count / 2, 3));
      }
    }
    srt_request join = request(SRT_JOIN, nullptr, nullptr, 0);
    run_well(context, on_gpu(join, rank));
  });
  CHECK_EQUAL(fake.calls("ncclReduceScatter"), 4);
}

// In this case the members' agreement and the operation itself are phases of one plan.
TEST(the_first_operation_may_be_one_that_nccl_cannot_do) {
  Fake fake;
  on_each_gpu(fake, {2, 3, 4}, [&](int rank, int size, Context& context) {
    for (const int64_t count : {int64_t{9001}, int64_t{400'000}}) {
      srt_request request = world::request(SRT_ALLREDUCE, nullptr, &count, 1, DType::int16);
      CHECK_EQUAL(difference(fake, context, rank, request, count), 0);
      request.kind = SRT_REDUCESCATTER;
      const int64_t rows = rows_of_member(count, static_cast<size_t>(size), static_cast<size_t>(rank));
      CHECK_EQUAL(difference(fake, context, rank, request, rows), 0);
    }
  });
}

TEST(small_and_large_tensors_are_fused) {
  Fake fake;
  on_each_gpu(fake, {2, 4}, [&](int rank, int size, Context& context) {
    UserStream stream(fake, rank);
    std::vector<OnGpu> data;
    std::vector<std::string> names;
    std::vector<int64_t> counts;
    for (int i = 0; i < 40; ++i) {
      counts.push_back(i % 5 == 0 ? 20'000 + i : 1 + 13 * i);
      names.push_back("tensor." + std::to_string(i));
      data.emplace_back(fake, rank, std::vector<uint8_t>(static_cast<size_t>(counts.back()) * sizeof(float)));
    }
    for (int step = 0; step < 4; ++step) {
      std::vector<srt_request> requests;
      for (size_t i = 0; i < data.size(); ++i) {
        const std::vector<float> filled(static_cast<size_t>(counts[i]),
                                        static_cast<float>(rank + step) + static_cast<float>(i));
        data[i].bytes().assign(reinterpret_cast<const uint8_t*>(filled.data()),
                               reinterpret_cast<const uint8_t*>(filled.data() + filled.size()));
        requests.push_back(in_place(SRT_ALLREDUCE, names[i].c_str(), data[i], counts[i], rank, stream.number()));
      }
      run_batch_well(context, requests);
      int64_t wrong = 0;
      for (int i = 0; i < 40; ++i)
        for (float value : values_in<float>(data[static_cast<size_t>(i)].bytes()))
          wrong += value != static_cast<float>(size * (step + i) + size * (size - 1) / 2);
      CHECK_EQUAL(wrong, 0);
    }
  });
}
