// Factors of sums on GPUs: 16-bit floats are scaled in float32 after the sum, by kernels of our own. The fake libcuda
// interprets the kernels' text, so that these tests are of what a driver compiles.
#include <barrier>
#include <cmath>

#include "data/kernels/half.h"
#include "gpu_world.h"

using namespace world;

namespace {

constexpr size_t patterns = 1 << 16;

// Returns all values of a 16-bit type.
std::vector<uint8_t> all_values() {
  std::vector<uint16_t> values(patterns);
  for (size_t i = 0; i < patterns; ++i) values[i] = static_cast<uint16_t>(i);
  return bytes_of(values);
}

float widened(DType dtype, uint16_t bits) {
  return dtype == DType::float16 ? widen(Float16{bits}) : widen(BFloat16{bits});
}

// Returns the number of elements that differ; a NaN equals any other.
int64_t differing(DType dtype, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  const auto left = values_in<uint16_t>(a), right = values_in<uint16_t>(b);
  int64_t count = std::ssize(left) - std::ssize(right);
  for (size_t i = 0; i < left.size(); ++i)
    count += left[i] != right[i] && !(std::isnan(widened(dtype, left[i])) && std::isnan(widened(dtype, right[i])));
  return count;
}

std::vector<uint8_t> filled(DType dtype, size_t count, double value) {
  std::vector<uint8_t> bytes(dtype_bytes(dtype) * count);
  choose_kernels("auto").of(dtype)->from_double(bytes.data(), std::vector<double>(count, value).data(), count);
  return bytes;
}

// The factors of a reduction.
struct Factors {
  int32_t op = SRT_AVERAGE;
  double prescale = 1.0, postscale = 1.0;
};

// Reduces a tensor on the rank's GPU in place.
std::vector<uint8_t> reduced(FakeGpu& fake, Context& context, int rank, DType dtype, std::vector<uint8_t> bytes,
                             const Factors& factors) {
  const auto count = static_cast<int64_t>(bytes.size() / dtype_bytes(dtype));
  OnGpu data(fake, rank, std::move(bytes));
  srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, rank);
  request.dtype = static_cast<int32_t>(dtype);
  request.reduce_op = factors.op;
  request.prescale = factors.prescale;
  request.postscale = factors.postscale;
  run_well(context, request);
  return data.bytes();
}

// Returns the first element of a reduction over three ranks, which have the same value everywhere.
double reduced(FakeGpu& fake, DType dtype, double value, const Factors& factors, const Options& options = on_gpus()) {
  double first = 0;
  World ranks(3, options);
  ranks.run([&](int rank, Context& context) {
    const auto found = reduced(fake, context, rank, dtype, filled(dtype, 5, value), factors);
    double results[5];
    choose_kernels("auto").of(dtype)->to_double(results, found.data(), 5);
    CHECK_EQUAL(found, filled(dtype, 5, results[0]));
    if (rank == 0) first = results[0];
  });
  return first;
}

// Kernels on a GPU of the fake.
struct OnOneGpu {
  OnOneGpu() : libraries(Fake::config()) { CHECK(Gpu::open(libraries, 0, gpu).is_ok()); }

  void finish() const {
    GpuEventPtr end;
    CHECK(gpu->events().record(gpu->launches(), end).is_ok());
    for (bool is_over = false; !is_over && end->look(is_over).is_ok();) std::this_thread::yield();
  }

  const GpuLibraries libraries;
  std::unique_ptr<Gpu> gpu;
};

}  // namespace

TEST(kernels_scale_every_value_as_the_cpu_does) {
  Fake fake;
  const OnOneGpu on;
  const GpuDevice::Scope scope(&on.gpu->device());
  const std::vector<Scale> scales = {{1.0, 7},   {1.0, 1024}, {1.0 / 3, 1}, {1e30, 1}, {1e-30, 1}, {2.0, 1},
                                     {1e300, 1}, {0.0, 1},    {3.0, 98},    {1.0, 3},  {-0.7, 5}};
  for (const DType dtype : {DType::float16, DType::bfloat16})
    for (const Scale& scale : check::of(scales, 2))
      for (const size_t shift : {0, 2}) {  // an address for the wide kernel, and another
        std::vector<uint8_t> bytes = all_values(), expected = bytes;
        choose_kernels("baseline").of(dtype)->scale(expected.data(), bytes.data(), patterns, scale);
        bytes.insert(bytes.begin(), shift, 0);
        OnGpu data(fake, 0, bytes);
        auto* const begin = reinterpret_cast<uint8_t*>(data.address() + shift);
        const GpuCopy in_place{begin, begin, 2 * patterns};
        CHECK(on.gpu->kernels().scale(dtype, {&in_place, 1}, scale, on.gpu->launches()).is_ok());
        on.finish();
        const std::vector<uint8_t> found(data.bytes().begin() + static_cast<ptrdiff_t>(shift), data.bytes().end());
        CHECK_EQUAL(differing(dtype, found, expected), 0);
      }
}

TEST(kernels_copy_pieces_of_every_length_and_place) {
  Fake fake;
  const OnOneGpu on;
  const GpuDevice::Scope scope(&on.gpu->device());
  constexpr size_t room = 64;  // bytes for each piece
  std::vector<uint8_t> source(150 * room);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 7 % 251);
  OnGpu from(fake, 0, source), to(fake, 0, std::vector<uint8_t>(source.size(), 255));
  std::vector<uint8_t> expected(source.size(), 255);
  std::vector<GpuCopy> copies;
  for (size_t i = 0; i < 150; ++i) {
    const size_t out = i * room + i % 9, in = i * room + i % 5, bytes = i % 50;
    copies.push_back({reinterpret_cast<uint8_t*>(to.address() + out),
                      reinterpret_cast<const uint8_t*>(from.address() + in), static_cast<int64_t>(bytes)});
    std::copy_n(source.begin() + static_cast<ptrdiff_t>(in), bytes, expected.begin() + static_cast<ptrdiff_t>(out));
  }
  CHECK(on.gpu->kernels().copy(copies, on.gpu->launches()).is_ok());
  on.finish();
  CHECK_EQUAL(to.bytes(), expected);
}

TEST(a_long_tensor_is_scaled_by_one_launch) {
  Fake fake;
  const OnOneGpu on;
  const GpuDevice::Scope scope(&on.gpu->device());
  const size_t count = check::is_sanitized ? 600'003 : 1'200'003;
  OnGpu data(fake, 0, filled(DType::bfloat16, count, 6));
  auto* const begin = reinterpret_cast<uint8_t*>(data.address());
  const GpuCopy in_place{begin, begin, static_cast<int64_t>(2 * count)};
  const int before = fake.calls("cuLaunchKernel");
  CHECK(on.gpu->kernels().scale(DType::bfloat16, {&in_place, 1}, {1.0, 3}, on.gpu->launches()).is_ok());
  CHECK_EQUAL(fake.calls("cuLaunchKernel") - before, 2);  // and another for the last three
  on.finish();
  CHECK(data.bytes() == filled(DType::bfloat16, count, 2));
}

TEST(an_average_of_16_bit_floats_is_the_cpus) {
  Fake fake;
  World ranks(3, on_gpus());
  ranks.run([&](int rank, Context& context) {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
      // Rank 0 has all values: their sums with zeros are exact.
      const std::vector<uint8_t> mine = rank ? std::vector<uint8_t>(2 * patterns) : all_values();
      std::vector<uint8_t> expected(2 * patterns);
      const std::vector<uint8_t> all = all_values(), zeros(2 * patterns);
      const void* const sources[] = {all.data(), zeros.data(), zeros.data()};
      const ReduceKernel sum = choose_kernels("auto").of(dtype)->reduce[static_cast<int>(ReduceOp::sum)];
      for (const Factors& factors : {Factors{}, Factors{SRT_SUM, 1.0, 1.0 / 3}, Factors{SRT_AVERAGE, 1.0, 0.7}}) {
        sum(expected.data(), sources, 3, patterns, {factors.postscale, factors.op == SRT_AVERAGE ? 3 : 1});
        CHECK_EQUAL(differing(dtype, reduced(fake, context, rank, dtype, mine, factors), expected), 0);
      }
    }
  });
}

TEST(scattered_and_packed_sums_are_scaled) {
  Fake fake;
  World ranks(3, on_gpus());
  ranks.run([&](int rank, Context& context) {
    for (const int64_t rows : {3, 4, 30'000, 90'001}) {  // packed or not; with equal parts or not
      const auto own = static_cast<size_t>(rows_of_member(rows, 3, static_cast<size_t>(rank)));
      OnGpu input(fake, rank, filled(DType::bfloat16, static_cast<size_t>(rows), 5));
      OnGpu output(fake, rank, filled(DType::bfloat16, own, 0));
      srt_request request = on_gpu(world::request(SRT_REDUCESCATTER, "x", &rows, 1, DType::bfloat16), rank);
      request.reduce_op = SRT_AVERAGE;
      request.input = input.address();
      request.output = output.address();
      run_well(context, request);
      CHECK(output.bytes() == filled(DType::bfloat16, own, 5));
    }
  });
}

TEST(small_values_of_float16_do_not_vanish) {
  Fake fake;
  CHECK_EQUAL(reduced(fake, DType::float16, 0x1p-24, {}), 0x1p-24);
  CHECK_EQUAL(reduced(fake, DType::float16, 0x1p-24, {SRT_SUM, 1.0, 1.0 / 3}), 0x1p-24);
}

TEST(a_factor_before_the_sum_keeps_float16_in_its_range) {
  Fake fake;
  CHECK_EQUAL(reduced(fake, DType::float16, 40'000, {}), INFINITY);  // as is its sum, 120,000
  CHECK_EQUAL(reduced(fake, DType::float16, 40'000, {SRT_AVERAGE, 0.25, 4.0}), 40'000);
  CHECK_EQUAL(reduced(fake, DType::float16, 40'000, {SRT_AVERAGE, 1.0 / 3, 3.0}), 40'000);
  CHECK_EQUAL(reduced(fake, DType::float16, 40'000, {SRT_SUM, -1.0 / 5, 1.0}), -24'000);
  CHECK_EQUAL(reduced(fake, DType::float16, 3, {SRT_SUM, 1e-12, 1e12}), 9);
  CHECK_EQUAL(reduced(fake, DType::float16, 3, {SRT_SUM, 0.0, 1.0}), 0);
}

TEST(kernels_scale_only_what_nccl_cannot) {
  Fake fake;
  const auto launches_of = [&](int size, DType dtype, const Factors& factors) {
    World ranks(size, on_gpus());
    std::barrier done(size);
    int launches = 0;
    ranks.run([&](int rank, Context& context) {
      const std::vector<uint8_t> eight = filled(dtype, 100, 8);
      reduced(fake, context, rank, dtype, eight, {SRT_SUM});
      done.arrive_and_wait();
      const int before = fake.calls("cuLaunchKernel");
      done.arrive_and_wait();
      reduced(fake, context, rank, dtype, eight, factors);
      done.arrive_and_wait();
      if (rank == 0) launches = fake.calls("cuLaunchKernel") - before;
    });
    return launches / size;
  };
  CHECK_EQUAL(launches_of(2, DType::float32, {SRT_AVERAGE, 1.0, 1.0 / 3}), 0);
  CHECK_EQUAL(launches_of(2, DType::float64, {SRT_SUM, 1.0 / 3, 1.0}), 0);
  CHECK_EQUAL(launches_of(2, DType::bfloat16, {}), 0);
  CHECK_EQUAL(launches_of(2, DType::bfloat16, {SRT_AVERAGE, 0.25, 4.0}), 0);
  CHECK_EQUAL(launches_of(3, DType::bfloat16, {}), 1);
  CHECK_EQUAL(launches_of(2, DType::float16, {}), 1);
  CHECK_EQUAL(launches_of(2, DType::float16, {SRT_AVERAGE, 0.5, 2.0}), 0);  // all of it is before the sum
  CHECK_EQUAL(launches_of(2, DType::float16, {SRT_SUM}), 0);
}

TEST(a_rank_without_kernels_makes_all_ranks_scale_by_nccl) {
  const std::pair<const char*, int> failures[] = {
      {"cuModuleLoadData", 222}, {"cuModuleGetFunction", 500}, {"cuLaunchKernel", 999}};
  for (const auto& [function, result] : failures) {
    Fake fake;
    const Said said;
    fake.fail(function, 2, result);  // fails on a rank that is not the first to call it, or for its second kernel
    CHECK_EQUAL(reduced(fake, DType::float16, 0x1p-24, {}, saying(said)), 0);
    CHECK_EQUAL(reduced(fake, DType::bfloat16, 3, {SRT_SUM, 1.0, 1.0 / 3}, saying(said)), 3);  // with kernels again
    CHECK_EQUAL(said.times("averages and factors of 16-bit floats are rounded before the sum: rank"), 1);
    CHECK_EQUAL(said.times(format("cannot use kernels: %s failed; CUDA says: ", function)), 1);
  }
}

TEST(a_launch_that_fails_ends_all_ranks) {
  for (const int nth : {19, 20}) {  // after those with which three ranks load six kernels each
    Fake fake;
    fake.is_to_break();
    fake.fail("cuLaunchKernel", nth, 999);
    World ranks(3, on_gpus());
    int failed = 0;
    Mutex mutex;
    ranks.run([&](int rank, Context& context) {
      OnGpu data(fake, rank, filled(DType::bfloat16, 8, 1));
      const int64_t count = 8;
      srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, rank);
      request.dtype = static_cast<int32_t>(DType::bfloat16);
      request.reduce_op = SRT_AVERAGE;
      Ticket handle = 0;
      Status ended = context.enqueue(&request, 1, &handle);
      if (ended.is_ok()) ended = context.wait(&handle, 1, patience);
      context.release(&handle, 1);
      const MutexLock lock(mutex);
      failed += contains(ended, "cuLaunchKernel failed; CUDA says: unknown error (error 999)");
    });
    CHECK(failed > 0);
  }
}
