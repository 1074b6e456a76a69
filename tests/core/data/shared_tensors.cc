// Tensors in memory that the ranks of a host share: allocation, all-reduces in place, and who may write when.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include "host_memory.h"
#include "world.h"

using namespace world;

namespace {

std::unique_ptr<SharedBuffer> allocated(SharedArena& arena, int64_t bytes) {
  std::unique_ptr<SharedBuffer> buffer;
  const Status status = arena.allocate(bytes, buffer);
  if (!status.is_ok()) check::fail(__FILE__, __LINE__, status.text());
  return buffer;
}

// A rank's floats in shared memory.
struct Floats {
  Floats(Context& context, int64_t count) : count(count) {
    if (const Status status = context.allocate_shared(count * 4, buffer); !status.is_ok())
      check::fail(__FILE__, __LINE__, status.text());
  }
  float* begin() const { return reinterpret_cast<float*>(buffer->data()); }
  float* end() const { return begin() + count; }
  srt_request allreduce(const char* name) const {
    srt_request made = request(SRT_ALLREDUCE, name, &count, 1);
    made.input = made.output = reinterpret_cast<uintptr_t>(begin());
    return made;
  }

  int64_t count;
  std::unique_ptr<SharedBuffer> buffer;
};

}  // namespace

TEST(memory_is_zeroed_and_used_again) {
  HostMemory host(2);
  auto first = allocated(host.arena(0), 10'000), second = allocated(host.arena(0), 1);
  uint8_t* address = first->data();
  CHECK(second->data() >= address + 10'000);
  std::fill_n(address, 10'000, uint8_t{7});
  first.reset();
  auto again = allocated(host.arena(0), 3 * 4096);
  CHECK(again->data() == address);
  CHECK_EQUAL(std::count(again->data(), again->data() + 3 * 4096, 0), 3 * 4096);
  second.reset();
  again.reset();
  CHECK(allocated(host.arena(0), 1 << 20)->data() == address);  // the holes have become one
}

TEST(a_rank_sees_what_another_writes) {
  HostMemory host(3);
  const auto own = allocated(host.arena(2), 100), other = allocated(host.arena(0), 100);
  const int64_t offset = host.arena(2).own()->offset_of(own->data(), 100);
  CHECK(offset > 0);
  own->data()[99] = 42;
  CHECK_EQUAL(host.arena(0).section(2)[offset + 99], 42);
  CHECK_EQUAL(host.arena(2).own()->offset_of(other->data(), 1), -1);
  CHECK_EQUAL(host.arena(2).own()->offset_of(own->data(), host.arena(2).section_bytes()), -1);
}

TEST(freed_memory_goes_back_to_the_system_after_the_end_too) {
  std::unique_ptr<SharedBuffer> kept, freed;
  HostMemory host(2);
  kept = allocated(host.arena(1), 100);
  freed = allocated(host.arena(1), 100);
  uint8_t* address = freed->data();
  address[0] = 5;
  for (auto& peers : host.peers) peers->close();
  kept->data()[0] = 7;
  freed.reset();
  CHECK_EQUAL(address[0], 0);  // a page that the file does not have
  CHECK_EQUAL(kept->data()[0], 7);
}

TEST(a_child_keeps_what_it_writes) {
  HostMemory host(2);
  const auto own = allocated(host.arena(0), 100), other = allocated(host.arena(1), 100);
  const int64_t offset = host.arena(0).own()->offset_of(own->data(), 100);
  own->fork_child();  // as after a fork
  own->data()[3] = 9;
  CHECK_EQUAL(own->data()[3], 9);
  CHECK_EQUAL(host.arena(1).section(0)[offset + 3], 0);
}

TEST(memory_outlives_the_rank) {
  std::unique_ptr<SharedBuffer> kept;
  {
    HostMemory host(2);
    kept = allocated(host.arena(1), 100);
  }
  kept->data()[99] = 1;
  CHECK_EQUAL(kept->data()[99], 1);
}

TEST(what_cannot_be_allocated_is_refused) {
  HostMemory host(2);
  std::unique_ptr<SharedBuffer> buffer;
  CHECK_EQUAL(host.arena(0).allocate(int64_t{1} << 60, buffer).code(), SRT_OUT_OF_MEMORY);
  CHECK(!buffer);
  Config config;
  REQUIRE(config.set("shared_tensors", "0").is_ok());
  CHECK_EQUAL(SharedRegion::layout(config, 2).section_bytes, 0);
  SharedArena none(-1, {}, 2, 0);
  CHECK_EQUAL(none.allocate(1, buffer).code(), SRT_UNSUPPORTED);
}

TEST(a_layout_that_promises_too_much_is_refused) {
  Config config;
  Descriptor memory;
  RegionHeader layout = SharedRegion::layout(config, 2);
  REQUIRE(SharedRegion::create(layout, 2, memory).is_ok());
  layout.section_bytes += 4096;
  REQUIRE(::pwrite(memory.get(), &layout, sizeof layout, 0) == sizeof layout);
  std::unique_ptr<SharedRegion> region;
  CHECK_EQUAL(SharedRegion::open(config, memory.get(), 0, 2, region).code(), SRT_INVALID_ARGUMENT);
}

TEST(nobody_writes_after_a_rank_has_withdrawn) {
  HostMemory host(2);
  LocalPeers &writer = *host.peers[0], &other = *host.peers[1];
  CHECK(writer.begin_writing({0, 1}));
  CHECK(other.is_writing(0));
  CHECK(!writer.is_writing(0));  // itself
  writer.end_writing();
  CHECK(!other.is_writing(0));
  other.withdraw();
  CHECK(!writer.begin_writing({0, 1}));
  CHECK(!other.is_writing(0));
  CHECK(!other.begin_writing({0, 1}));  // nor does it write itself
}

TEST(a_writer_and_a_rank_that_withdraws_never_miss_each_other) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    HostMemory host(2);
    std::atomic<int> ready{0};
    const auto together = [&] {
      ++ready;
      while (ready < 2) {
      }
    };
    bool writes = false;
    std::thread writer([&] {
      together();
      writes = host.peers[0]->begin_writing({1});
    });
    together();
    host.peers[1]->withdraw();
    const bool is_seen = host.peers[1]->is_writing(0);
    writer.join();
    CHECK(!writes || is_seen);
  }
}

TEST(ranks_reduce_in_place_and_alike) {
  for (const int size : {2, 3, 4})
    for (const char* chunk : {"0", "4096"}) {
      World ranks(size, over(Over::mapped, {{"chunk_bytes", chunk}}));
      ranks.run([&](int rank, Context& context) {
        for (const int64_t count : {int64_t{4'097}, int64_t{70'001}}) {
          const Floats data(context, count);
          for (int step = 0; step < 3; ++step) {
            for (int64_t i = 0; i < count; ++i) data.begin()[i] = static_cast<float>(i % 1000 + rank);
            run_well(context, data.allreduce("x"));
            int64_t wrong = 0;
            for (int64_t i = 0; i < count; ++i)
              wrong += data.begin()[i] != static_cast<float>(i % 1000 * size + size * (size - 1) / 2);
            CHECK_EQUAL(wrong, 0);
          }
        }
      });
    }
}

TEST(ranks_that_share_and_ranks_that_do_not_take_turns) {
  constexpr int64_t count = 50'000;
  for (const int size : {2, 3}) {
    World ranks(size, over(Over::mapped, {{"chunk_bytes", "4096"}}));
    ranks.run([&](int rank, Context& context) {
      const Floats shared(context, count);
      std::vector<float> own(count);
      for (int step = 0; step < 1 << size; ++step) {
        const bool shares = (step >> rank & 1) != 0;
        float* data = shares ? shared.begin() : own.data();
        std::fill_n(data, count, static_cast<float>(rank + step));
        run_well(context, shares ? shared.allreduce("x") : in_place(SRT_ALLREDUCE, "x", own, count, DType::float32));
        CHECK_EQUAL(std::count(data, data + count, static_cast<float>(size * step + size * (size - 1) / 2)), count);
      }
    });
  }
}

TEST(a_rank_that_leaves_in_the_middle_is_noticed) {
  constexpr int64_t count = 500'000;
  World ranks(2, over(Over::mapped, {{"log_descriptor", "-1"}}));
  std::atomic<bool> has_left{false};
  ranks.run([&](int rank, Context& context) {
    const Floats data(context, count);
    run_well(context, data.allreduce("x"));
    const Ticket handle = start(context, data.allreduce("x"));
    if (rank == 1) {
      context.shutdown(0);  // without waiting for what is in flight
      has_left = true;
    } else {
      while (!has_left) std::this_thread::yield();
      const Status status = context.wait(&handle, 1, seconds(30));
      CHECK(status.is_ok() || status.code() == SRT_PEER_LOST || status.code() == SRT_PEER_FINISHED);
    }
  });
}

TEST(a_directory_that_leads_elsewhere_is_refused) {
  constexpr int64_t count = 50'000;
  World ranks(2, over(Over::mapped, {{"log_descriptor", "-1"}}));
  ranks.run([&](int rank, Context& context) {
    const Floats data(context, count);
    run_well(context, data.allreduce("x"));
    // Rank 1 overwrites its directory, with which its section begins, as a hostile rank would.
    // It uses another mapping of it, at an address that ThreadSanitizer does not connect with this one.
    void* other = ::mremap(data.buffer->data() - 64 * KiB, 0, 4096, MREMAP_MAYMOVE);
    REQUIRE(other != MAP_FAILED);
    auto* directory = static_cast<volatile uint64_t*>(other);
    std::atomic<bool> is_over{false};
    std::thread hostile([&] {
      while (rank == 1 && !is_over) directory[0] = uint64_t{1} << 62;
    });
    Status status;
    while (status.is_ok()) status = end_of(context, data.allreduce("x"));
    is_over = true;
    hostile.join();
    ::munmap(other, 4096);
    CHECK(contains(status, "rank 1 offered a tensor outside the memory that it shares"));
  });
}
