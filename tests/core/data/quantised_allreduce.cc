// All-reduces in a wire format: every rank gets the bits of the reference, for any sizes, ranks, hosts and factors.
#include <atomic>
#include <cmath>
#include <random>

#include "faulty_wire.h"
#include "wire_reference.h"
#include "world.h"

using namespace world;
using reference::formats;
using reference::same_bits;

namespace {

using Values = std::vector<float>;

// The arguments of an all-reduce, the same on all ranks.
struct Sum {
  WireFormat format = WireFormat::int8;
  int32_t op = SRT_SUM;
  double prescale = 1, postscale = 1;
};

// Returns a rank's numbers; the blocks differ in magnitude.
Values numbers_of(int rank, int64_t count, uint32_t seed = 0) {
  std::mt19937 random(seed * 1'000 + static_cast<uint32_t>(rank));
  Values values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::ldexp(static_cast<float>(random() % 2'001) - 1e3f, static_cast<int>(i / wire_block % 5) - 12);
  return values;
}

void add(Values& sum, const Values& addend) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += addend[i];
}

// Returns the result of an all-reduce over hosts: within each host sums are exact floats, in rank order.
Values expected(const Sum& sum, const std::vector<Values>& inputs, const std::vector<int>& hosts) {
  std::map<int, Values> by_host;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    Values scaled = inputs[rank];
    for (float& value : scaled) value *= static_cast<float>(sum.prescale);
    const auto [host, is_first] = by_host.try_emplace(hosts[rank], scaled);
    if (!is_first) add(host->second, scaled);
  }
  Values total;
  for (const auto& [host, values] : by_host) {
    const Values rounded = reference::round(sum.format, values);
    if (total.empty()) total = rounded;
    else add(total, rounded);
  }
  for (float& value : total) {
    value *= static_cast<float>(sum.postscale);
    if (sum.op == SRT_AVERAGE) value /= static_cast<float>(inputs.size());
  }
  return reference::round(sum.format, total);
}

srt_request in_format(const Sum& sum, const char* name, Values& data, const int64_t& count) {
  srt_request request = in_place(SRT_ALLREDUCE, name, data, count, DType::float32);
  request.wire_format = static_cast<int32_t>(sum.format);
  request.reduce_op = sum.op;
  request.prescale = sum.prescale;
  request.postscale = sum.postscale;
  return request;
}

std::vector<Values> of_all_ranks(int size, int64_t count, uint32_t seed = 0) {
  std::vector<Values> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(numbers_of(rank, count, seed));
  return all;
}

// Reduces tensors of these sizes, submitted together, and compares every rank's results with the reference.
void check_sums(World& ranks, const std::vector<int>& hosts, const Sum& sum, const std::vector<int64_t>& counts) {
  const auto size = static_cast<int>(hosts.size());
  std::vector<Values> wanted;
  for (size_t i = 0; i < counts.size(); ++i)
    wanted.push_back(expected(sum, of_all_ranks(size, counts[i], static_cast<uint32_t>(i)), hosts));
  ranks.run([&](int rank, Context& context) {
    std::vector<Values> data;
    std::vector<std::string> names;
    for (size_t i = 0; i < counts.size(); ++i) {
      data.push_back(numbers_of(rank, counts[i], static_cast<uint32_t>(i)));
      names.push_back(format("t%zu", i));
    }
    std::vector<srt_request> requests;
    for (size_t i = 0; i < counts.size(); ++i) requests.push_back(in_format(sum, names[i].c_str(), data[i], counts[i]));
    run_batch_well(context, requests);
    for (size_t i = 0; i < counts.size(); ++i)
      if (!same_bits(data[i], wanted[i])) check::fail(__FILE__, __LINE__, format("tensor %zu on rank %d", i, rank));
  });
}

// Returns the host of each rank if all of them are alone, as over sockets.
std::vector<int> each_alone(int size) {
  std::vector<int> hosts;
  for (int rank = 0; rank < size; ++rank) hosts.push_back(rank);
  return hosts;
}

srt_statistics statistics_of(Context& context) {
  srt_statistics counted{};
  counted.struct_size = sizeof counted;
  context.statistics(counted, nullptr);
  return counted;
}

}  // namespace

TEST(sums_of_any_size_match_the_reference) {
  for (int size : {2, 3, 5})
    for (WireFormat format : formats)
      for (int64_t count : check::of<int64_t>({2, 255, 256, 511, 513, 1'280, 4'095, 1, 257, 4'097, 20'001}, 4))
        for (const char* chunk : {"0", "4096"}) {
          World ranks(size, over(Over::sockets, {{"chunk_bytes", chunk}}));
          check_sums(ranks, each_alone(size), {format}, {count});
        }
}

TEST(an_empty_tensor_is_a_sum_too) {
  World ranks(2, over(Over::sockets));
  check_sums(ranks, {0, 1}, {}, {0});
}

TEST(fused_tensors_are_rounded_as_if_alone) {
  const std::vector<int64_t> counts{1, 300, 256, 7, 2'000, 255, 0, 513, 12'345, 3};
  for (int size : {2, 3, 5})
    for (WireFormat format : formats) {
      World ranks(size, over(Over::sockets, {{"chunk_bytes", "4096"}}));
      check_sums(ranks, each_alone(size), {format}, counts);
      CHECK_EQUAL(statistics_of(ranks[0]).largest_plan, static_cast<int64_t>(counts.size()));
    }
}

TEST(averages_and_factors_apply_once) {
  for (const Sum& sum : {Sum{WireFormat::int8, SRT_AVERAGE}, Sum{WireFormat::fp8, SRT_AVERAGE, 0.3, 7},
                         Sum{WireFormat::int8, SRT_SUM, 0.125, 1}, Sum{WireFormat::fp8, SRT_SUM, 1, 3}})
    for (const std::vector<int>& hosts : {std::vector<int>{0, 1, 2}, {0, 0, 1, 1}, {0, 1, 0, 1, 0}}) {
      World ranks(static_cast<int>(hosts.size()), on_hosts(hosts, {{"chunk_bytes", "4096"}}));
      check_sums(ranks, hosts, sum, {5'000, 77});
    }
}

TEST(random_tensors_match_the_reference) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 30; ++trial) {
    const int size = std::vector<int>{2, 3, 5}[random() % 3];
    std::vector<int64_t> counts(1 + random() % 6);
    for (int64_t& count : counts)
      count = std::max<int64_t>(static_cast<int64_t>(random() % 9 * wire_block + random() % 5) - 2, 0);
    World ranks(size, over(Over::sockets, {{"chunk_bytes", "4096"}}));
    check_sums(ranks, each_alone(size), {formats[random() % 2], static_cast<int32_t>(random() % 2)}, counts);
  }
}

// Hosts with several ranks sum exactly inside, and only their sums are encoded, in the same blocks as anywhere.
TEST(sums_are_encoded_between_hosts_only) {
  for (const std::vector<int>& hosts : placements)
    for (WireFormat format : formats) {
      World ranks(static_cast<int>(hosts.size()), on_hosts(hosts, {{"chunk_bytes", "4096"}}));
      check_sums(ranks, hosts, {format}, {1, 700, 33'333, 255, 4'096});
    }
}

TEST(large_sums_between_hosts_are_cut_where_blocks_begin) {
  for (const std::vector<int>& hosts : check::of<std::vector<int>>({{0, 0, 1, 1}, {0, 0, 0, 1}})) {
    World ranks(4, on_hosts(hosts, {{"sockets_per_link", "2"}}));
    check_sums(ranks, hosts, {WireFormat::int8, SRT_AVERAGE}, {3'000'001, 77, 2'000'003});
  }
}

// The last piece of a plan would begin inside the last block.
TEST(no_piece_of_a_large_sum_is_empty) {
  World ranks(4, on_hosts({0, 0, 1, 1}));
  check_sums(ranks, {0, 0, 1, 1}, {}, {2 * (1 << 20) + 100});
}

TEST(direct_encodes_the_parts_of_all_ranks) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1, 1}, {0, 1, 2}}) {
    const auto size = static_cast<int>(hosts.size());
    World ranks(size, on_hosts(hosts, {{"cpu_algorithm", "direct"}}));
    check_sums(ranks, each_alone(size), {WireFormat::fp8}, {10'001});
  }
}

TEST(a_block_that_is_not_finite_on_one_rank_is_nan_on_all) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    for (WireFormat format : formats) {
      World ranks(3, over(Over::sockets));
      ranks.run([&](int rank, Context& context) {
        const int64_t count = 1'000;
        const Values good = expected({format}, of_all_ranks(3, count), {0, 1, 2});
        Values data = numbers_of(rank, count);
        if (rank == 1) data[300] = bad;
        run_well(context, in_format({format}, "bad", data, count));
        for (size_t i = 0; i < data.size(); ++i) {
          const bool is_bad = i / wire_block == 1;
          CHECK_EQUAL(std::bit_cast<uint32_t>(data[i]), is_bad ? 0x7fc00000 : std::bit_cast<uint32_t>(good[i]));
        }
      });
    }
}

TEST(ranks_that_have_joined_or_are_absent_contribute_zeros) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1, 2}, {0, 0, 1, 1}}) {
    const auto size = static_cast<int>(hosts.size());
    World ranks(size, on_hosts(hosts, {{"chunk_bytes", "4096"}}));
    const int64_t count = 3'000;
    const Sum sum{WireFormat::int8, SRT_AVERAGE};
    std::vector<Values> inputs = of_all_ranks(size, count);
    inputs[1].assign(inputs[1].size(), 0.0f);
    const Values wanted = expected(sum, inputs, hosts);
    ranks.run([&](int rank, Context& context) {
      for (const bool joins : {false, true}) {
        Values data = numbers_of(rank, count);
        srt_request request = in_format(sum, joins ? "joined" : "absent", data, count);
        if (rank == 1 && !joins) {
          request.flags = SRT_REQUEST_ABSENT;
          request.input = 0;
        }
        if (rank != 1 || !joins) {
          run_well(context, request);
          CHECK(same_bits(data, wanted));
        }
        if (joins) run_well(context, world::request(SRT_JOIN, nullptr, nullptr, 0));
      }
    });
  }
}

TEST(process_sets_encode_among_their_members) {
  World ranks(4, over(Over::sockets));
  ranks.run([](int rank, Context& context) {
    const int32_t set = add_set(context, {0, 3});
    if (rank == 1 || rank == 2) return;
    const int64_t count = 2'000;
    Values data = numbers_of(rank, count);
    srt_request request = in_format({}, "of two", data, count);
    request.process_set = set;
    run_well(context, request);
    CHECK(same_bits(data, expected({}, {numbers_of(0, count), numbers_of(3, count)}, {0, 1})));
  });
}

TEST(ranks_that_share_memory_add_exactly) {
  for (int size : {1, 3}) {
    World ranks(size, over(Over::memory));
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 2'000;
      Values data = numbers_of(rank, count), sum = numbers_of(0, count);
      for (int other = 1; other < size; ++other) add(sum, numbers_of(other, count));
      run_well(context, in_format({}, "exact", data, count));
      CHECK(same_bits(data, sum));
      CHECK(!context.has_wire_format(0));
      CHECK_EQUAL(statistics_of(context).encoded_bytes, 0);
    });
  }
}

TEST(a_rank_knows_whether_formats_have_an_effect) {
  World sockets(2, over(Over::sockets));
  sockets.run([](int, Context& context) { CHECK(context.has_wire_format(0)); });
  World ranks(3, on_hosts({0, 0, 1}));
  ranks.run([](int rank, Context& context) {
    const int32_t within = add_set(context, {0, 1}), across = add_set(context, {1, 2}), one = add_set(context, {2});
    CHECK(context.has_wire_format(0));
    CHECK(!context.has_wire_format(within));
    CHECK_EQUAL(context.has_wire_format(across), rank > 0);
    CHECK(!context.has_wire_format(one));
    CHECK(!context.has_wire_format(99));
  });
}

// Each element is sent to its owner by all others, and by the owner to all others.
TEST(encoded_bytes_are_counted) {
  for (int size : {2, 3, 5}) {
    const int64_t count = 10'001;
    std::atomic<int64_t> encoded{0}, unencoded{0};
    World ranks(size, over(Over::sockets));
    ranks.run([&](int rank, Context& context) {
      Values data = numbers_of(rank, count), exact = data;
      run_well(context, in_format({}, "counted", data, count));
      run_well(context, in_format({WireFormat::exact}, "not counted", exact, count));
      encoded += statistics_of(context).encoded_bytes;
      unencoded += statistics_of(context).unencoded_bytes;
    });
    CHECK_EQUAL(encoded.load(),
                2 * (size - 1) * static_cast<int64_t>(sirtaki::encoded_size(static_cast<size_t>(count))));
    CHECK_EQUAL(unencoded.load(), 2 * (size - 1) * 4 * count);
  }
}

// A format that changes from step to step is no longer the cached one.
TEST(a_format_may_change_between_steps) {
  World ranks(2, over(Over::sockets));
  ranks.run([](int rank, Context& context) {
    const int64_t count = 600;
    for (WireFormat format : {WireFormat::int8, WireFormat::int8, WireFormat::fp8, WireFormat::int8}) {
      Values data = numbers_of(rank, count);
      run_well(context, in_format({format}, "x", data, count));
      CHECK(same_bits(data, expected({format}, of_all_ranks(2, count), {0, 1})));
    }
  });
}

TEST(an_abort_ends_an_encoded_sum) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1, 2}, {0, 0, 1, 1}}) {
    const auto size = static_cast<int>(hosts.size());
    World ranks(size, on_hosts(hosts));
    std::atomic<int> through{0};
    ranks.run([&](int rank, Context& context) {
      const int64_t count = 1'000'000;
      Values data = numbers_of(rank, count);
      run_well(context, in_format({}, "x", data, count));
      for (++through; through < size;) std::this_thread::yield();
      std::thread aborter;
      if (rank == 0) aborter = std::thread([&] { context.abort("RuntimeError: enough"); });
      Status status;
      while (status.is_ok()) status = end_of(context, in_format({}, "x", data, count));
      CHECK_EQUAL(status.code(), SRT_ABORTED);
      if (aborter.joinable()) aborter.join();
    });
  }
}

TEST(a_connection_that_breaks_in_an_encoded_sum_ends_every_rank) {
  for (size_t after : {0, 100, 3'000, 100'000}) {
    Wire wire(Fault::cut, after);
    Options options = on_hosts({0, 1, 2}, {{"chunk_bytes", "4096"}});
    options.connect = wire.between(0, 2);
    World ranks(3, std::move(options));
    ranks.run([](int rank, Context& context) {
      const int64_t count = 50'000;
      Values data = numbers_of(rank, count);
      Status status;
      while (status.is_ok()) status = end_of(context, in_format({}, "x", data, count));
      CHECK_EQUAL(status.code(), SRT_PEER_LOST);
    });
  }
}
