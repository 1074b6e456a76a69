// Whole contexts, from enqueue to a finished handle, over shared memory and over sockets.
#include <numeric>

#include "world.h"

using namespace world;

TEST(allreduce_sums_exactly) {
  on_each({1, 2, 3, 4}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      for (int64_t count : {int64_t{1}, int64_t{7}, int64_t{1000}, int64_t{70'001}}) {
        std::vector<float> data(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = static_cast<float>(i % 1000 + rank);
        run_well(context, in_place(SRT_ALLREDUCE, "x", data, count, DType::float32));
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; ++i)
          wrong += data[static_cast<size_t>(i)] != static_cast<float>(i % 1000 * size + size * (size - 1) / 2);
        CHECK_EQUAL(wrong, 0);
      }
    });
  });
}

TEST(many_small_tensors_in_one_batch) {
  on_each({1, 2, 3, 4}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      constexpr int tensors = 300;
      const int64_t count = 33;
      std::vector<std::vector<double>> data(tensors, std::vector<double>(static_cast<size_t>(count), rank + 1));
      std::vector<std::string> names;
      std::vector<srt_request> requests;
      for (int i = 0; i < tensors; ++i) names.push_back("tensor." + std::to_string(i));
      for (int step = 0; step < 5; ++step) {
        requests.clear();
        for (int i = 0; i < tensors; ++i) {
          std::fill(data[static_cast<size_t>(i)].begin(), data[static_cast<size_t>(i)].end(), rank + i);
          requests.push_back(in_place(SRT_ALLREDUCE, names[static_cast<size_t>(i)].c_str(),
                                      data[static_cast<size_t>(i)], count, DType::float64));
        }
        run_batch_well(context, requests);
        for (int i = 0; i < tensors; ++i)
          for (double value : data[static_cast<size_t>(i)]) CHECK_EQUAL(value, size * i + size * (size - 1) / 2);
      }
    });
  });
}

TEST(broadcast_and_ragged_allgather) {
  on_each({1, 2, 3, 4}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 5000;
      std::vector<int16_t> data(static_cast<size_t>(count), static_cast<int16_t>(rank));
      srt_request broadcast = in_place(SRT_BROADCAST, "b", data, count, DType::int16);
      broadcast.root = size - 1;
      run_well(context, broadcast);
      for (int16_t value : data) CHECK_EQUAL(value, size - 1);

      const int64_t shape[] = {rank * 700, 3};
      std::vector<int32_t> part(static_cast<size_t>(shape[0] * 3 + 1), rank);
      srt_request gather = request(SRT_ALLGATHER, "g", shape, 2, DType::int32);
      gather.input = reinterpret_cast<uintptr_t>(part.data());
      for (int again = 0; again < 2; ++again)
        run_well(context, gather, [&](Ticket handle) {
          srt_tensor output;
          expect_ok(context.output(handle, output));
          CHECK_EQUAL(output.shape[0], int64_t{700} * size * (size - 1) / 2);
          CHECK_EQUAL(output.shape[1], 3);
          const auto* values = reinterpret_cast<const int32_t*>(output.data);
          int64_t wrong = 0;
          for (int from = 0; from < size; ++from)
            for (int i = 0; i < from * 2100; ++i) wrong += *values++ != from;
          CHECK_EQUAL(wrong, 0);
        });
    });
  });
}

// Returns the request with memory for its result.
srt_request into(srt_request request, std::vector<int32_t>& result) {
  request.output = reinterpret_cast<uintptr_t>(result.data());
  request.output_bytes = static_cast<int64_t>(result.size() * sizeof(int32_t));
  return request;
}

bool is_result_in(Context& context, Ticket handle, const std::vector<int32_t>& memory) {
  srt_tensor output{};
  return context.output(handle, output).is_ok() && output.data == reinterpret_cast<uintptr_t>(memory.data());
}

TEST(a_result_goes_to_the_callers_memory_if_it_fits) {
  on_each({1, 2, 4}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      const int64_t shape[] = {rank * 700 + 1, 3};
      const std::vector<int32_t> part(static_cast<size_t>(shape[0] * 3), rank);
      std::vector<int32_t> expected;
      for (int from = 0; from < size; ++from)
        expected.insert(expected.end(), static_cast<size_t>(from * 2100 + 3), from);
      srt_request gather = request(SRT_ALLGATHER, "g", shape, 2, DType::int32);
      gather.input = reinterpret_cast<uintptr_t>(part.data());
      for (int elements_more : {0, 1, -1}) {
        std::vector<int32_t> result(expected.size() + static_cast<size_t>(elements_more), -1);
        const std::vector<int32_t> before = result;
        run_well(context, into(gather, result), [&](Ticket handle) {
          CHECK_EQUAL(is_result_in(context, handle, result), elements_more == 0);
          CHECK(output_of<int32_t>(context, handle) == expected);
        });
        if (elements_more) CHECK(result == before);
      }
      const int64_t rows = size;
      std::vector<int32_t> sent(static_cast<size_t>(size)), received(static_cast<size_t>(size));
      for (int to = 0; to < size; ++to) sent[static_cast<size_t>(to)] = 10 * rank + to;
      const std::vector<int64_t> splits(static_cast<size_t>(size), 1);
      srt_request exchange = with_splits(request(SRT_ALLTOALL, "e", &rows, 1, DType::int32), splits);
      exchange.input = reinterpret_cast<uintptr_t>(sent.data());
      run_well(context, into(exchange, received),
               [&](Ticket handle) { CHECK(is_result_in(context, handle, received)); });
      for (int from = 0; from < size; ++from) CHECK_EQUAL(received[static_cast<size_t>(from)], 10 * from + rank);
    });
  });
}

TEST(a_result_does_not_overwrite_inputs) {
  on_each({2, 3}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 2000;
      const auto place = [&](int of) { return static_cast<ptrdiff_t>(count * of); };
      std::vector<int32_t> whole(static_cast<size_t>(count * size), -1), expected;
      for (int from = 0; from < size; ++from) expected.insert(expected.end(), static_cast<size_t>(count), from);
      srt_request gather = into(request(SRT_ALLGATHER, "g", &count, 1, DType::int32), whole);
      for (const bool is_own_place : {true, false}) {
        const int at = is_own_place ? rank : (rank + 1) % size;
        std::fill_n(whole.begin() + place(at), count, rank);
        gather.input = reinterpret_cast<uintptr_t>(whole.data() + place(at));
        run_well(context, gather, [&](Ticket handle) {
          CHECK_EQUAL(is_result_in(context, handle, whole), is_own_place);
          CHECK(output_of<int32_t>(context, handle) == expected);
        });
      }
    });
  });
}

std::string refusal(Context& context, const srt_request& request) {
  Ticket handle = 0;
  return context.enqueue(&request, 1, &handle).text();
}

TEST(memory_for_a_result_belongs_to_one_operation) {
  World ranks(2, {});
  ranks.run([&](int rank, Context& context) {
    const int64_t count = 4;
    std::vector<int32_t> data(4, rank), result(8);
    srt_request gather = into(request(SRT_ALLGATHER, "a", &count, 1, DType::int32), result);
    gather.input = reinterpret_cast<uintptr_t>(data.data());
    const Ticket first = start(context, gather);
    if (rank == 0) {
      gather.name = "b";
      CHECK(contains(refusal(context, gather), "would use memory of 'a'"));
      gather.name = "c";
      gather.output_bytes = -1;
      CHECK(contains(refusal(context, gather), "output_bytes is negative"));
    }
    CHECK(context.wait(&first, 1, seconds(30)).is_ok());
    CHECK(result == std::vector<int32_t>({0, 0, 0, 0, 1, 1, 1, 1}));
    context.release(&first, 1);
  });
}
