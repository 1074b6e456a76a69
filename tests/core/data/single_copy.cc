// Movers that read the other ranks' memory: what is moved, what happens where it cannot be read, and when it no longer
// may be.
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include "data/memory/memory_operation.h"
#include "host_memory.h"
#include "world.h"

using namespace world;

namespace {

iovec part(const void* address, size_t bytes) { return {const_cast<void*>(address), bytes}; }

// A broadcast from rank 0 of a host with two ranks, which a test advances by hand.
class Broadcast {
 public:
  explicit Broadcast(HostMemory& host, int64_t bytes = 64 * KiB)
      : sent_(static_cast<size_t>(bytes)), received(static_cast<size_t>(bytes)) {
    for (size_t i = 0; i < sent_.size(); ++i) sent_[i] = static_cast<uint8_t>(i % 251 + 1);
    expected = sent_;
    for (size_t rank = 0; rank < 2; ++rank) {
      auto transfer = std::make_shared<Transfer>();
      transfer->plan = 7;
      transfer->kind = Kind::broadcast;
      transfer->dtype = DType::uint8;
      transfer->members = {0, 1};
      transfer->own = rank;
      std::vector<uint8_t>& memory = rank ? received : sent_;
      transfer->buffer.add(memory.data(), memory.data(), bytes);
      backends_.push_back(std::make_unique<MemoryBackend>(*host.peers[rank], baseline_kernels()));
      operations.push_back(backends_.back()->start(transfer));
    }
  }

  Progress advance(size_t rank) {
    Progress progress = Progress::blocked;
    CHECK(operations[rank]->advance(now(), progress).is_ok());
    return progress;
  }

  // Lets both ranks work in turn. Returns whether both have ended.
  bool run() {
    bool has_ended[2] = {};
    for (int turn = 0; turn < 100; ++turn)
      for (size_t rank = 0; rank < 2; ++rank)
        if (!has_ended[rank]) has_ended[rank] = advance(rank) == Progress::done;
    return has_ended[0] && has_ended[1];
  }

  std::string algorithm(size_t rank) const { return operations[rank]->algorithm(); }

  // Runs it to its end, and checks that everything has arrived by this algorithm.
  void expect(const std::string& algorithm_of_all) {
    CHECK(run());
    for (size_t rank : {0, 1}) CHECK_EQUAL(algorithm(rank), algorithm_of_all);
    CHECK(received == expected);
  }

  void scribble() { std::ranges::fill(sent_, uint8_t{255}); }

 private:
  std::vector<uint8_t> sent_;
  std::vector<std::unique_ptr<MemoryBackend>> backends_;

 public:
  std::vector<uint8_t> received, expected;
  std::vector<std::unique_ptr<Operation>> operations;
};

int64_t single_copies(Context& context) {
  srt_operation_count rows[64];
  int64_t count = 0;
  for (int32_t row = 0, most = context.count_operations(rows, 64); row < most; ++row)
    if (rows[row].algorithm == std::string("single copy")) count += static_cast<int64_t>(rows[row].operations);
  return count;
}

std::vector<int64_t> numbered(int64_t count, int64_t from) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), from * 1'000'000);
  return values;
}

srt_request gather(const char* name, const std::vector<int64_t>& input, const int64_t* shape) {
  srt_request made = request(SRT_ALLGATHER, name, shape, 1, DType::int64);
  made.input = reinterpret_cast<uintptr_t>(input.data());
  return made;
}

void gather_rows(int rank, int size, Context& context, const std::function<int64_t(int rank)>& rows) {
  const std::vector<int64_t> input = numbered(rows(rank), rank);
  std::vector<int64_t> expected;
  for (int from = 0; from < size; ++from) {
    const std::vector<int64_t> part = numbered(rows(from), from);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  const int64_t shape[] = {rows(rank)};
  run_well(context, gather("gather", input, shape),
           [&](Ticket handle) { CHECK(output_of<int64_t>(context, handle) == expected); });
}

void exchange_rows(int rank, int size, Context& context, const std::function<int64_t(int from, int to)>& rows) {
  std::vector<int64_t> splits, input, expected;
  for (int to = 0; to < size; ++to) {
    splits.push_back(rows(rank, to));
    const std::vector<int64_t> sent = numbered(rows(rank, to), rank * size + to);
    input.insert(input.end(), sent.begin(), sent.end());
    const std::vector<int64_t> wanted = numbered(rows(to, rank), to * size + rank);
    expected.insert(expected.end(), wanted.begin(), wanted.end());
  }
  const int64_t shape[] = {static_cast<int64_t>(input.size())};
  srt_request made = with_splits(request(SRT_ALLTOALL, "exchange", shape, 1, DType::int64), splits);
  made.input = reinterpret_cast<uintptr_t>(input.data());
  run_well(context, made, [&](Ticket handle) { CHECK(output_of<int64_t>(context, handle) == expected); });
}

void broadcast_all(int rank, Context& context, int root, int64_t tensors, int64_t count) {
  std::vector<std::vector<int64_t>> data;
  std::vector<int64_t> counts;  // requests point to them
  std::vector<std::string> names;
  for (int64_t i = 0; i < tensors; ++i) {
    counts.push_back(count + i);
    data.push_back(numbered(count + i, rank == root ? i : -1));
    names.push_back("broadcast." + std::to_string(i));
  }
  std::vector<srt_request> requests;
  for (size_t i = 0; i < data.size(); ++i) {
    requests.push_back(in_place(SRT_BROADCAST, names[i].c_str(), data[i], counts[i], DType::int64));
    requests.back().root = root;
  }
  run_batch_well(context, requests);
  for (int64_t i = 0; i < tensors; ++i) CHECK(data[static_cast<size_t>(i)] == numbered(count + i, i));
}

}  // namespace

TEST(a_rank_reads_scattered_parts_of_anothers_memory) {
  HostMemory host(2);
  CHECK(host.memory(0).reads_peers(1) && host.memory(1).reads_peers(0));
  const std::string first = "What one rank has", second = " another one reads";
  std::string to(first.size() + second.size(), ' ');
  std::vector<iovec> from_parts{part(first.data(), first.size()), part(second.data(), second.size())};
  std::vector<iovec> to_parts{part(to.data(), 3), part(to.data() + 3, to.size() - 3)};
  CHECK(host.memory(1).read(0, from_parts, to_parts));
  CHECK_EQUAL(to, first + second);
  CHECK(from_parts.empty() && to_parts.empty());
}

TEST(memory_that_is_not_there_is_not_read) {
  HostMemory host(2);
  void* gone = ::mmap(nullptr, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(gone != MAP_FAILED);
  ::munmap(static_cast<uint8_t*>(gone) + 4096, 4096);
  std::vector<uint8_t> to(2 * 4096);
  std::vector<iovec> from_parts{part(gone, to.size())}, to_parts{part(to.data(), to.size())};
  CHECK(!host.memory(1).read(0, from_parts, to_parts));
  ::munmap(gone, 4096);
}

TEST(withdrawn_memory_is_not_read) {
  HostMemory host(2);
  const int value = 42;
  int found = 0;
  const auto reads = [&](int reader, int owner) {
    std::vector<iovec> from_parts{part(&value, sizeof value)}, to_parts{part(&found, sizeof found)};
    return host.memory(reader).read(owner, from_parts, to_parts);
  };
  CHECK(reads(1, 0));
  host.memory(0).withdraw();
  CHECK(!reads(1, 0));
  CHECK(reads(0, 1));
  host.peers[1].reset();  // the end of a rank withdraws as well
  CHECK(!reads(0, 1));
}

TEST(nobody_reads_where_that_is_switched_off) {
  HostMemory host(2, {{"single_copy", "0"}});
  CHECK(!host.memory(0).reads_peers(0) && !host.memory(0).reads_peers(1));
  Broadcast(host).expect("");
}

TEST(few_bytes_and_broadcasts_of_very_many_are_copied_twice) {
  HostMemory host(2);
  const int64_t cache = SharedRegion::chunks_a_cache * static_cast<int64_t>(host.peers[0]->region().chunk_bytes());
  for (const auto& [bytes, algorithm] : std::vector<std::pair<int64_t, const char*>>{
           {32 * KiB - 1, ""}, {32 * KiB, "single copy"}, {cache, "single copy"}, {cache + 1, ""}}) {
    HostMemory fresh(2);
    Broadcast(fresh, bytes).expect(algorithm);
  }
}

TEST(ranks_that_cannot_read_each_other_copy_twice) {
  HostMemory host(2);
  Broadcast broadcast(host);
  host.memory(0).withdraw();  // as if the system refused the read
  CHECK_EQUAL(broadcast.algorithm(1), "single copy");
  broadcast.expect("");
}

TEST(a_rank_that_could_not_read_lists_nothing_from_then_on) {
  HostMemory host(2);
  host.memory(1).note_unread(0);
  Broadcast(host).expect("");
}

TEST(what_a_failed_rank_had_to_give_is_not_taken) {
  HostMemory host(2);
  Broadcast broadcast(host);
  CHECK(broadcast.advance(1) == Progress::moved);
  CHECK(broadcast.advance(0) == Progress::moved);  // rank 0 has listed its data, and only waits for rank 1
  broadcast.operations[0]->cancel();
  broadcast.scribble();  // its program may do that now
  for (int turn = 0; turn < 20; ++turn) CHECK(broadcast.advance(1) != Progress::done);
  CHECK_EQUAL(broadcast.operations[1]->waits_for(), std::vector<int32_t>{0});
}

TEST(everything_arrives_in_one_copy) {
  for (const int size : {2, 3, 4})
    for (const char* chunk : {"0", "16384"}) {
      World ranks(size, over(Over::memory, {{"chunk_bytes", chunk}}));
      ranks.run([&](int rank, Context& context) {
        const int64_t before = single_copies(context);
        for (const int64_t rows : {int64_t{4'096}, int64_t{70'001}}) {
          gather_rows(rank, size, context, [&](int from) { return from == 1 ? 0 : rows + from; });
          exchange_rows(rank, size, context, [&](int from, int to) { return from == 1 ? 0 : rows + from * 10 + to; });
        }
        CHECK_EQUAL(single_copies(context) - before, 4);
        broadcast_all(rank, context, size - 1, 1, 6'000);
        CHECK_EQUAL(single_copies(context) - before, 5);
        broadcast_all(rank, context, 0, 20, 300);  // some of them fused
      });
    }
}

TEST(small_pieces_are_copied_twice) {
  constexpr int tensors = 300;
  World ranks(2, over(Over::memory, {{"chunk_bytes", "4096"}}));
  ranks.run([&](int rank, Context& context) {
    const std::vector<int64_t> input = numbered(64, rank);
    const int64_t shape[] = {64};
    std::vector<std::string> names;
    for (int i = 0; i < tensors; ++i) names.push_back("gather." + std::to_string(i));
    std::vector<srt_request> requests;
    for (const std::string& name : names) requests.push_back(gather(name.c_str(), input, shape));
    std::vector<int64_t> expected = numbered(64, 0);
    const std::vector<int64_t> other = numbered(64, 1);
    expected.insert(expected.end(), other.begin(), other.end());
    run_batch_well(context, requests, [&](const std::vector<Ticket>& handles) {
      for (Ticket handle : handles) CHECK(output_of<int64_t>(context, handle) == expected);
    });
    CHECK_EQUAL(single_copies(context), 0);
  });
}
