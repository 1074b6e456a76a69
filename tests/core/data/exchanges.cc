// Reduce-scatter, all-to-all, send and Adasum over shared memory and over sockets, alone and all at once.
#include <algorithm>
#include <cmath>

#include "plan/request.h"
#include "world.h"

using namespace world;

namespace {

const std::vector<int> sizes{1, 2, 3, 5};

int64_t sum_of_ranks(int size) { return int64_t{size} * (size - 1) / 2; }

// Returns element `i` of what rank `from` gives to rank `to`.
int64_t element(int from, int to, int64_t i) { return (from * 100 + to) * 1'000'000 + i; }

constexpr int64_t width = 3;

// Runs an all-to-all in which rank `from` gives `rows(from, to)` rows to rank `to`; checks every element of it.
void exchange(Context& context, int rank, int size, const std::function<int64_t(int from, int to)>& rows) {
  std::vector<int64_t> splits, expected, wanted_splits;
  std::vector<int64_t> input;
  for (int to = 0; to < size; ++to) {
    splits.push_back(rows(rank, to));
    for (int64_t i = 0; i < splits.back() * width; ++i) input.push_back(element(rank, to, i));
  }
  for (int from = 0; from < size; ++from) {
    wanted_splits.push_back(rows(from, rank));
    for (int64_t i = 0; i < wanted_splits.back() * width; ++i) expected.push_back(element(from, rank, i));
  }
  const int64_t shape[] = {static_cast<int64_t>(input.size()) / width, width};
  srt_request request = with_splits(world::request(SRT_ALLTOALL, "exchange", shape, 2, DType::int64), splits);
  request.input = reinterpret_cast<uintptr_t>(input.data());
  run_well(context, request, [&](Ticket handle) {
    CHECK(output_of<int64_t>(context, handle) == expected);
    std::vector<int64_t> received(static_cast<size_t>(size), -1);
    CHECK_EQUAL(context.result_splits(handle, received.data(), size), size);
    CHECK_EQUAL(received, wanted_splits);
  });
}

// Combines whole vectors by Adasum's definition.
std::vector<double> combine(const std::vector<double>& a, const std::vector<double>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  const double of_a = aa > 0 ? 1 - ab / (2 * aa) : 1, of_b = bb > 0 ? 1 - ab / (2 * bb) : 1;
  std::vector<double> sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) sum[i] = of_a * a[i] + of_b * b[i];
  return sum;
}

std::vector<double> adasum_of(std::vector<std::vector<double>> vectors) {
  while (vectors.size() > 1) {
    std::vector<std::vector<double>> next;
    for (size_t i = 0; i + 1 < vectors.size(); i += 2) next.push_back(combine(vectors[i], vectors[i + 1]));
    if (vectors.size() % 2) next.push_back(vectors.back());
    vectors = std::move(next);
  }
  return vectors.front();
}

std::vector<double> gradient(int rank, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    values[static_cast<size_t>(i)] = static_cast<double>((i * 7 + rank * 13) % 23) - 9;
  return values;
}

bool is_near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b)); }

}  // namespace

TEST(reducescatter_cuts_unevenly_and_sums_exactly) {
  on_each(sizes, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      for (int64_t rows : {int64_t{0}, int64_t{1}, int64_t{size} - 1, int64_t{size} + 1, int64_t{9'001}}) {
        std::vector<int32_t> input(static_cast<size_t>(rows * width));
        for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<int32_t>(i % 1'000) + rank;
        const auto members = static_cast<size_t>(size), own = static_cast<size_t>(rank);
        int64_t first = 0;
        for (size_t member = 0; member < own; ++member) first += rows_of_member(rows, members, member);
        const int64_t share = rows_of_member(rows, members, own);
        std::vector<int32_t> output(static_cast<size_t>(share * width), -1);
        const int64_t shape[] = {rows, width};
        srt_tensor described{};
        run_well(context, from_to(request(SRT_REDUCESCATTER, "cut", shape, 2, DType::int32), input, output),
                 [&](Ticket handle) { expect_ok(context.output(handle, described)); });
        int64_t wrong = 0;
        for (size_t i = 0; i < output.size(); ++i) {
          const auto at = (static_cast<size_t>(first * width) + i) % 1'000;
          wrong += output[i] != static_cast<int64_t>(at) * size + sum_of_ranks(size);
        }
        CHECK_EQUAL(wrong, 0);
        CHECK_EQUAL(described.shape[0], share);
        CHECK_EQUAL(described.bytes, output.size() * sizeof(int32_t));
      }
    });
  });
}

TEST(reducescatter_scales_and_finds_extremes) {
  on_each({1, 2, 5}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      const int64_t count = int64_t{size} * 1'500;
      const std::vector<float> input(static_cast<size_t>(count), static_cast<float>(rank + 1));
      for (int op : {SRT_SUM, SRT_AVERAGE, SRT_MIN, SRT_MAX}) {
        std::vector<float> output(1'500, -1);
        srt_request request = from_to(world::request(SRT_REDUCESCATTER, "scaled", &count, 1), input, output);
        request.reduce_op = op;
        request.prescale = 2.0;
        request.postscale = static_cast<double>(size);
        run_well(context, request);
        const auto sum = static_cast<float>(2 * (sum_of_ranks(size) + size));
        const float expected = op == SRT_SUM       ? sum * static_cast<float>(size)
                               : op == SRT_AVERAGE ? sum
                               : op == SRT_MIN     ? 2.0f * static_cast<float>(size)
                                                   : 2.0f * static_cast<float>(size * size);
        CHECK_EQUAL(std::count(output.begin(), output.end(), expected), 1'500);
      }
    });
  });
}

TEST(alltoall_with_any_splits) {
  on_each(sizes, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      exchange(context, rank, size, [](int, int) { return 0; });
      exchange(context, rank, size, [](int from, int to) { return (from + 2 * to) % 4; });
      exchange(context, rank, size, [](int from, int to) { return (2 * from + to) % 3 * 400; });
      // Several chunks between a single pair of ranks; then a ring, and back to the splits that were cached first.
      exchange(context, rank, size, [=](int from, int to) { return from == 0 && to == size - 1 ? 4'000 : 0; });
      exchange(context, rank, size, [=](int from, int to) { return to == (from + 1) % size ? 1'000 : 0; });
      exchange(context, rank, size, [](int from, int to) { return (from + 2 * to) % 4; });
    });
  });
}

TEST(alltoall_without_splits_cuts_evenly) {
  on_each({1, 2, 3}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      const int64_t count = int64_t{size} * 2;
      const std::vector<int16_t> input(static_cast<size_t>(count), static_cast<int16_t>(rank));
      srt_request request = world::request(SRT_ALLTOALL, "even", &count, 1, DType::int16);
      request.input = reinterpret_cast<uintptr_t>(input.data());
      std::vector<int16_t> expected;
      for (int from = 0; from < size; ++from) expected.insert(expected.end(), 2, static_cast<int16_t>(from));
      run_well(context, request, [&](Ticket handle) { CHECK_EQUAL(output_of<int16_t>(context, handle), expected); });
    });
  });
}

TEST(sends_both_ways_at_once) {
  on_each({2, 3, 5}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 5'000;
      for (int step = 0; step < 10; ++step) {
        std::vector<std::vector<int32_t>> data;
        std::vector<srt_request> requests;
        for (int peer = 0; peer < size; ++peer)
          for (int from : {rank, peer}) {
            if (peer == rank) continue;
            const int value = from == rank ? rank * 100 + peer + step : -1;
            data.emplace_back(static_cast<size_t>(count), value);
            requests.push_back(world::request(SRT_SEND, "mail", &count, 1, DType::int32));
            requests.back().input = requests.back().output = reinterpret_cast<uintptr_t>(data.back().data());
            requests.back().root = from;
            requests.back().destination = from == rank ? peer : rank;
          }
        run_batch_well(context, requests);
        size_t at = 0;
        for (int peer = 0; peer < size; ++peer)
          for (int from : {rank, peer}) {
            if (peer == rank) continue;
            const int expected = from * 100 + (from == rank ? peer : rank) + step;
            CHECK_EQUAL(std::count(data[at].begin(), data[at].end(), expected), count);
            ++at;
          }
      }
    });
  });
}

TEST(sends_that_cannot_be_are_refused_here) {
  World ranks(3, {});
  ranks.run([&](int rank, Context& context) {
    const int64_t count = 2;
    std::vector<float> data(2);
    const auto refused = [&](int from, int to, int64_t group) {
      srt_request request = in_place(SRT_SEND, "x", data, count, DType::float32);
      request.root = from;
      request.destination = to;
      request.group_id = group;
      request.group_size = group ? 1 : 0;
      Ticket handle = 0;
      return context.enqueue(&request, 1, &handle).code() == SRT_INVALID_ARGUMENT && !handle;
    };
    CHECK(refused(rank, rank, 0));
    CHECK(refused(rank, 3, 0));
    CHECK(refused(-1, rank, 0));
    CHECK(refused((rank + 1) % 3, (rank + 2) % 3, 0));
    CHECK(refused(rank, (rank + 1) % 3, 7));
  });
}

TEST(a_send_of_another_shape_is_told_to_both) {
  World ranks(3, {});
  ranks.run([&](int rank, Context& context) {
    if (rank == 1) return;
    const int64_t count = rank + 1;
    std::vector<float> data(static_cast<size_t>(count));
    srt_request request = in_place(SRT_SEND, "x", data, count, DType::float32);
    request.destination = 2;
    const Status status = end_of(context, request);
    CHECK_EQUAL(status.code(), SRT_MISMATCH);
    CHECK(contains(status, "rank 2 (pid 102 on here) has float32 of shape [3]"));
  });
}

TEST(adasum_is_the_tree_of_its_definition) {
  on_each(sizes, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{100}, int64_t{7'001}}) {
        std::vector<std::vector<double>> everyone;
        for (int from = 0; from < size; ++from) everyone.push_back(gradient(from, count));
        std::vector<double> data = everyone[static_cast<size_t>(rank)];
        std::vector<float> narrow(data.begin(), data.end());
        std::vector<srt_request> requests{in_place(SRT_ALLREDUCE, "wide", data, count, DType::float64),
                                          in_place(SRT_ALLREDUCE, "narrow", narrow, count, DType::float32)};
        for (srt_request& request : requests) request.reduce_op = SRT_ADASUM;
        run_batch_well(context, requests);
        const std::vector<double> expected = adasum_of(everyone);
        int64_t wrong = 0;
        for (size_t i = 0; i < expected.size(); ++i)
          wrong += !is_near(data[i], expected[i], 1e-12) || !is_near(narrow[i], expected[i], 1e-6);
        CHECK_EQUAL(wrong, 0);
      }
    });
  });
}

TEST(adasum_averages_what_is_equal_and_adds_what_is_orthogonal) {
  on_each({2, 3, 4}, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 1'000;
      std::vector<double> equal = gradient(0, count), orthogonal(static_cast<size_t>(count));
      for (size_t i = static_cast<size_t>(rank); i < orthogonal.size(); i += static_cast<size_t>(size))
        orthogonal[i] = 3;
      // Both are in one plan: each tensor is combined by itself.
      std::vector<srt_request> requests{in_place(SRT_ALLREDUCE, "equal", equal, count, DType::float64),
                                        in_place(SRT_ALLREDUCE, "orthogonal", orthogonal, count, DType::float64)};
      for (srt_request& request : requests) {
        request.reduce_op = SRT_ADASUM;
        request.group_id = 1;
        request.group_size = 2;
      }
      run_batch_well(context, requests);
      CHECK(equal == gradient(0, count));
      CHECK_EQUAL(std::count(orthogonal.begin(), orthogonal.end(), 3.0), count);
    });
  });
}

namespace {

// Many small operations of one kind, each with its own name and memory.
class Crowd {
 public:
  static constexpr int most = 30;
  static constexpr int32_t kinds[] = {SRT_ALLREDUCE, SRT_BROADCAST, SRT_ALLGATHER, SRT_REDUCESCATTER, SRT_ALLTOALL};

  Crowd(int rank, int size) : rank_(rank), size_(size), count_(2 * size) {
    for (int32_t kind : kinds)
      for (int i = 0; i < most; ++i)
        members_.push_back({kind, i, std::to_string(kind) + "." + std::to_string(i), {}, {}});
  }

  std::vector<srt_request> requests(int step, bool is_group) {
    std::vector<srt_request> made;
    for (Member& member : members_) {
      member.input.assign(static_cast<size_t>(count_), rank_ + member.index + step);
      member.output.assign(static_cast<size_t>(count_), -1);
      srt_request& request =
          made.emplace_back(world::request(member.kind, member.name.c_str(), &count_, 1, DType::int32));
      request = from_to(request, member.input, member.output);
      if (member.kind == SRT_BROADCAST) request.root = member.index % size_;
      if (!is_group) continue;
      request.group_id = 5;
      request.group_size = static_cast<int32_t>(members_.size());
    }
    return made;
  }

  void check(Context& context, const std::vector<Ticket>& handles, int step) const {
    int wrong = 0;
    for (size_t i = 0; i < handles.size(); ++i)
      wrong += output_of<int32_t>(context, handles[i]) != expected(members_[i], step);
    CHECK_EQUAL(wrong, 0);
  }

 private:
  struct Member {
    int32_t kind;
    int index;
    std::string name;
    std::vector<int32_t> input, output;
  };

  std::vector<int32_t> expected(const Member& member, int step) const {
    const int base = member.index + step, sum = static_cast<int>(sum_of_ranks(size_)) + size_ * base;
    const auto count = static_cast<size_t>(count_);
    std::vector<int32_t> values;
    switch (member.kind) {
      case SRT_ALLREDUCE: return std::vector<int32_t>(count, sum);
      case SRT_BROADCAST: return std::vector<int32_t>(count, member.index % size_ + base);
      case SRT_REDUCESCATTER: return std::vector<int32_t>(2, sum);
      default:
        for (int from = 0; from < size_; ++from)
          values.insert(values.end(), member.kind == SRT_ALLGATHER ? count : 2, from + base);
        return values;
    }
  }

  int rank_, size_;
  int64_t count_;
  std::vector<Member> members_;
};

}  // namespace

TEST(many_small_operations_of_every_kind_at_once) {
  on_each(sizes, [](World& ranks, int size) {
    ranks.run([&](int rank, Context& context) {
      Crowd crowd(rank, size);
      for (int step = 0; step < 6; ++step) {
        run_batch_well(context, crowd.requests(step, step % 2 == 1),
                       [&](const std::vector<Ticket>& handles) { crowd.check(context, handles, step); });
      }
    });
  });
}
