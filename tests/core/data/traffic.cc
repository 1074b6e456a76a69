// The backends that move operations, and the bytes that links send.
#include "pipe.h"
#include "world.h"

using namespace world;

namespace {

struct Traffic {
  std::string backends, algorithm, transports;
};

// Sums a tensor once, and returns the backends of rank 0's operations and the transports over which it has sent.
Traffic traffic_of(int size, const Options& options, int64_t elements = 1000) {
  World ranks(size, options);
  ranks.run([&](int, Context& context) {
    std::vector<float> data(static_cast<size_t>(elements));
    run_well(context, in_place(SRT_ALLREDUCE, "x", data, elements, DType::float32));
  });
  Traffic found;
  srt_operation_count operations[8];
  for (int32_t row = 0, count = ranks[0].count_operations(operations, 8); row < count; ++row) {
    if (std::string_view(operations[row].kind) != "all-reduce") continue;
    found.backends += operations[row].backend;
    found.algorithm = operations[row].algorithm;
    CHECK_EQUAL(operations[row].operations, 1);
    CHECK_EQUAL(operations[row].failed, 0);
    CHECK_EQUAL(operations[row].bytes, 4 * elements);
  }
  srt_sent_bytes sent[8];
  for (int32_t row = 0, count = ranks[0].count_sent_bytes(sent, 8); row < count; ++row) {
    CHECK_EQUAL(std::string_view(sent[row].peer_host), "here");
    CHECK(sent[row].bytes > 0);
    found.transports += std::string(sent[row].transport) + " ";
  }
  return found;
}

}  // namespace

TEST(operations_and_bytes_are_counted_by_the_way_that_they_take) {
  const Traffic alone = traffic_of(1, over(Over::memory)), memory = traffic_of(2, over(Over::memory)),
                sockets = traffic_of(2, over(Over::sockets)), hosts = traffic_of(2, on_hosts({0, 1})),
                encrypted = traffic_of(2, on_hosts({0, 1}, {{"encrypt", "1"}})),
                hierarchy = traffic_of(4, on_hosts({0, 0, 1, 1}, {{"cpu_algorithm", "hierarchical"}}));
  CHECK_EQUAL(alone.backends + ": " + alone.transports, "single rank: ");
  CHECK_EQUAL(memory.backends + ": " + memory.transports, "shared memory: ring ");
  CHECK_EQUAL(sockets.backends + ": " + sockets.transports, "links: unix ");
  CHECK_EQUAL(hosts.backends + ": " + hosts.transports, "links: tcp ");
  CHECK_EQUAL(encrypted.backends + ": " + encrypted.transports, "links: tls ");
  CHECK_EQUAL(hierarchy.backends, "hierarchical");
  CHECK(hierarchy.transports.ends_with("tcp "));
}

TEST(an_operation_tells_the_algorithm_that_has_moved_it) {
  constexpr int64_t few = 1000, many = 100'000;
  const auto of = [](int size, const Options& options, int64_t elements) {
    return traffic_of(size, options, elements).algorithm;
  };
  CHECK_EQUAL(of(1, over(Over::memory), few), "");
  CHECK_EQUAL(of(2, over(Over::memory), many), "whole");
  CHECK_EQUAL(of(3, over(Over::memory), few), "whole");
  CHECK_EQUAL(of(8, over(Over::memory), few), "whole");
  CHECK_EQUAL(of(24, over(Over::memory), few), "sliced");  // 96 KB, read by each rank
  CHECK_EQUAL(of(3, over(Over::memory), many), "sliced");
  CHECK_EQUAL(of(2, over(Over::sockets), few), "direct");
  CHECK_EQUAL(of(2, on_hosts({0, 1}), few), "recursive_doubling");
  CHECK_EQUAL(of(2, on_hosts({0, 1}), many), "direct");
  CHECK_EQUAL(of(3, on_hosts({0, 1, 2}, {{"cpu_algorithm", "ring"}}), many), "ring");
  CHECK_EQUAL(of(4, on_hosts({0, 0, 1, 1}, {{"cpu_algorithm", "hierarchical"}}), many), "");
}

TEST(rows_that_have_no_room_are_counted_nevertheless) {
  World ranks(2, over(Over::memory));
  ranks.run([](int, Context& context) {
    for (const int kind : {SRT_ALLREDUCE, SRT_BROADCAST}) {
      std::vector<float> data(10);
      const int64_t count = 10;
      run_well(context, in_place(kind, "x", data, count, DType::float32));
    }
    srt_operation_count first[2] = {};
    CHECK_EQUAL(context.count_operations(nullptr, 0), 2);
    CHECK_EQUAL(context.count_operations(first, 1), 2);
    CHECK_EQUAL(std::string_view(first[0].kind), "all-reduce");
    CHECK(!first[1].kind);
  });
}

TEST(a_link_counts_what_its_pipe_takes) {
  SentBytes sent({7, 3, 7});
  const auto there = std::make_shared<Bytes>(), back = std::make_shared<Bytes>();
  Links links(3);
  links.count_in(sent);
  links.add_ring(2, std::make_unique<Pipe>(there, back));
  Link& link = *links.control(2);
  link.send({.kind = FrameKind::data}, Bytes(100));
  const auto total = [&] { return sent.of(0, Transport::ring).total(); };  // of the same host
  CHECK_EQUAL(total(), 0);
  CHECK(link.flush());
  CHECK_EQUAL(total(), static_cast<int64_t>(there->size()));
  CHECK(total() > 100);
  CHECK_EQUAL(sent.of(1, Transport::ring).total(), 0);
  std::string rows;
  sent.visit([&](int32_t peer, Transport transport, int64_t bytes) {
    if (bytes) rows += format("%d over %s", peer, transport_names[static_cast<size_t>(transport)]);
  });
  CHECK_EQUAL(rows, "0 over ring");
}
