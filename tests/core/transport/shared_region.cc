// The size of the chunks in shared memory: from the processor's caches or from the setting, and alike for all who map
// it.
#include "transport/memory/shared_region.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

using namespace sirtaki;

namespace {

constexpr int64_t KiB = 1024, MiB = 1024 * KiB;

size_t chunk_of(const Config& config, int fd, int slots) {
  std::unique_ptr<SharedRegion> region;
  const Status status = SharedRegion::open(config, fd, 0, slots, region);
  if (!status.is_ok()) check::fail(__FILE__, __LINE__, status.text());
  return region ? region->chunk_bytes() : 0;
}

// Returns the allocated bytes of some memory.
int64_t allocated(const Descriptor& memory) {
  struct stat facts{};
  if (::fstat(memory.get(), &facts) != 0) check::fail(__FILE__, __LINE__, "fstat");
  return int64_t{facts.st_blocks} * 512;
}

}  // namespace

TEST(chunks_fit_the_second_level_cache) {
  const auto fitting = SharedRegion::fitting_chunk_bytes;
  CHECK_EQUAL(fitting(2 * MiB, 2, 2), 512 * KiB);
  CHECK_EQUAL(fitting(1 * MiB, 2, 64), 256 * KiB);
  CHECK_EQUAL(fitting(2 * MiB, 4, 2), 256 * KiB);    // two ranks share a core and its cache
  CHECK_EQUAL(fitting(256 * KiB, 2, 2), 128 * KiB);  // smaller chunks cost more than they save
  CHECK_EQUAL(fitting(2 * MiB, 64, 2), 128 * KiB);
  CHECK_EQUAL(fitting(24 * MiB, 2, 2), 1 * MiB);     // a cache that many cores share
  CHECK_EQUAL(fitting(0, 2, 2), 512 * KiB);          // the cache size is unknown
}

TEST(whoever_maps_the_memory_sees_the_chunks_that_its_maker_has_chosen) {
  Config config;
  constexpr int slots = 3;
  Descriptor memory;
  RegionHeader more = SharedRegion::layout(config, slots);
  more.bytes += slots * SharedRegion::slots_each * 64 * KiB;
  REQUIRE(SharedRegion::create(more, slots, memory).is_ok());
  std::unique_ptr<SharedRegion> own;
  Descriptor usual;
  REQUIRE(SharedRegion::create(SharedRegion::layout(config, slots), slots, usual).is_ok());
  CHECK_EQUAL(chunk_of(config, memory.get(), slots), chunk_of(config, usual.get(), slots) + 64 * KiB);
}

TEST(a_wish_is_followed) {
  for (const auto& [wish, bytes] : {std::pair{"64K", 64 * KiB}, {"70000", 68 * KiB}, {"1", 4 * KiB}}) {
    Config config;
    REQUIRE(config.set("chunk_bytes", wish).is_ok());
    Descriptor memory;
    REQUIRE(SharedRegion::create(SharedRegion::layout(config, 2), 2, memory).is_ok());
    CHECK_EQUAL(chunk_of(config, memory.get(), 2), static_cast<size_t>(bytes));
  }
}

TEST(too_little_memory_is_refused) {
  Config config;
  REQUIRE(config.set("chunk_bytes", "64K").is_ok());
  Descriptor memory;
  REQUIRE(SharedRegion::create({SharedRegion::bytes_needed(config, 2) - 1, 0}, 2, memory).is_ok());
  std::unique_ptr<SharedRegion> region;
  CHECK(!SharedRegion::open(config, memory.get(), 0, 2, region).is_ok());
  CHECK(!SharedRegion::open(Config(), memory.get(), 0, 64, region).is_ok());
}

TEST(each_rank_allocates_the_chunks_that_it_writes) {
  constexpr int slots = 3;
  constexpr int64_t chunks = SharedRegion::slots_each * 4 * MiB;  // of a slot
  constexpr int64_t margin = 4 * MiB;                             // pages may be large
  const auto near = [](int64_t bytes, int64_t expected) {
    return bytes > expected - margin && bytes < expected + margin;
  };
  Config config;
  REQUIRE(config.set("chunk_bytes", "4M").is_ok());
  Descriptor memory;
  REQUIRE(SharedRegion::create(SharedRegion::layout(config, slots), slots, memory).is_ok());
  std::unique_ptr<SharedRegion> region;
  REQUIRE(SharedRegion::open(config, memory.get(), 0, slots, region).is_ok());
  CHECK(near(allocated(memory), 0));
  REQUIRE(region->allocate_chunks(memory.get(), 1).is_ok());
  CHECK(near(allocated(memory), chunks));
  const int64_t begin = SharedRegion::bytes_needed(config, slots) - 2 * chunks;
  REQUIRE(::fallocate(memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, chunks) == 0);
  CHECK(near(allocated(memory), 0));  // they were those of slot 1
  for (int slot = 0; slot < slots; ++slot) REQUIRE(region->allocate_chunks(memory.get(), slot).is_ok());
  CHECK(near(allocated(memory), slots * chunks));
  CHECK(!region->allocate_chunks(-1, 2).is_ok());
}
