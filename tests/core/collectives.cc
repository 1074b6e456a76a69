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
        Ticket handle;
        const srt_request request = in_place(SRT_ALLREDUCE, "x", data, count, DType::float32);
        const Status status = run_one(context, request, handle);
        CHECK_EQUAL(std::string(status.text()), "");
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; ++i)
          wrong += data[static_cast<size_t>(i)] != static_cast<float>(i % 1000 * size + size * (size - 1) / 2);
        CHECK_EQUAL(wrong, 0);
        context.release(&handle, 1);
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
        std::vector<Ticket> handles(tensors);
        CHECK_EQUAL(context.enqueue(requests.data(), tensors, handles.data()).code(), SRT_OK);
        CHECK_EQUAL(std::string(context.wait(handles.data(), tensors, seconds(30)).text()), "");
        for (int i = 0; i < tensors; ++i)
          for (double value : data[static_cast<size_t>(i)]) CHECK_EQUAL(value, size * i + size * (size - 1) / 2);
        context.release(handles.data(), tensors);
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
      Ticket handle;
      CHECK_EQUAL(std::string(run_one(context, broadcast, handle).text()), "");
      for (int16_t value : data) CHECK_EQUAL(value, size - 1);
      context.release(&handle, 1);

      const int64_t shape[] = {rank * 700, 3};
      std::vector<int32_t> part(static_cast<size_t>(shape[0] * 3 + 1), rank);
      srt_request gather = request(SRT_ALLGATHER, "g", shape, 2, DType::int32);
      gather.input = reinterpret_cast<uintptr_t>(part.data());
      for (int again = 0; again < 2; ++again) {
        CHECK_EQUAL(std::string(run_one(context, gather, handle).text()), "");
        srt_tensor output;
        CHECK_EQUAL(context.output(handle, output).code(), SRT_OK);
        CHECK_EQUAL(output.shape[0], int64_t{700} * size * (size - 1) / 2);
        CHECK_EQUAL(output.shape[1], 3);
        const auto* values = reinterpret_cast<const int32_t*>(output.data);
        int64_t wrong = 0;
        for (int from = 0; from < size; ++from)
          for (int i = 0; i < from * 2100; ++i) wrong += *values++ != from;
        CHECK_EQUAL(wrong, 0);
        context.release(&handle, 1);
      }
    });
  });
}

CHECK_MAIN()
