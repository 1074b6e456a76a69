// The ranks of a host that share memory: what one of them writes there, for all ranks or for a single peer.
#include "transport/memory/local_peers.h"

#include <sys/eventfd.h>

#include <random>

#include "check.h"
#include "transport/memory/ring_pipe.h"

using namespace sirtaki;

namespace {

// Two ranks in memory of their own; this is the first.
class Memory {
 public:
  Memory() {
    CHECK(config_.set("chunk_bytes", "4096").is_ok());
    bytes_.resize(static_cast<size_t>(SharedRegion::bytes_needed(config_, 2)) + 4096);
    const auto base = (reinterpret_cast<uintptr_t>(bytes_.data()) + 4095) / 4096 * 4096;
    const int32_t ranks[] = {0, 1}, bells[] = {bell_.get(), bell_.get()};
    const srt_memory memory{sizeof memory, -1, base, 0, 2, ranks, bells, bells, nullptr, nullptr};
    CHECK(LocalPeers::open(config_, memory, local_peers).is_ok());
  }

  std::unique_ptr<LocalPeers> local_peers;

 private:
  Config config_;
  std::vector<uint8_t> bytes_;
  Descriptor bell_{::eventfd(0, EFD_NONBLOCK)};
};

}  // namespace

TEST(the_first_abort_stays) {
  Memory memory;
  CHECK(!memory.local_peers->read_abort().is_there);
  memory.local_peers->write_abort({true, SRT_PEER_LOST, 1, "rank 1 was lost", 3});
  memory.local_peers->write_abort({true, SRT_ABORTED, 0, "a consequence", 4});
  const Abort abort = memory.local_peers->read_abort();
  CHECK(abort.is_there);
  CHECK_EQUAL(abort.status, SRT_PEER_LOST);
  CHECK_EQUAL(abort.rank, 1);
  CHECK_EQUAL(abort.text, "rank 1 was lost");
  CHECK_EQUAL(abort.decision, 3u);
}

TEST(an_abort_that_says_that_all_is_well_is_one_all_the_same) {
  for (const srt_status status : {srt_status{SRT_OK}, srt_status{SRT_MISMATCH}, srt_status{12'345}}) {
    Memory memory;
    memory.local_peers->write_abort({true, status, 1, "why", 0});
    CHECK_EQUAL(memory.local_peers->read_abort().status, SRT_ABORTED);
  }
}

TEST(a_ring_keeps_bytes_in_order_wherever_it_wraps) {
  Memory memory;
  RingPipe near(memory.local_peers->region(), 0, 1), far(memory.local_peers->region(), 1, 0);
  std::mt19937 random(5);
  uint8_t next_in = 0, next_out = 0;
  for (uint32_t i = 0; i < check::seeds(2'000); ++i) {
    std::vector<uint8_t> bytes(random() % SharedRegion::ring_bytes);
    for (size_t at = 0; at < bytes.size(); ++at) bytes[at] = static_cast<uint8_t>(next_in + at);
    const ptrdiff_t written = near.write(bytes, false);
    REQUIRE(written >= 0);
    next_in = static_cast<uint8_t>(next_in + written);
    const ptrdiff_t read = far.read(std::span(bytes).first(random() % (bytes.size() + 1)));
    REQUIRE(read >= 0);
    for (ptrdiff_t at = 0; at < read; ++at) CHECK_EQUAL(bytes[static_cast<size_t>(at)], next_out++);
  }
}

TEST(counters_that_cannot_be_end_a_ring) {
  Memory memory;
  RingPipe pipe(memory.local_peers->region(), 0, 1);
  std::vector<uint8_t> bytes(100);
  memory.local_peers->region().ring(1, 0).written.store(SharedRegion::ring_bytes + 1);
  CHECK_EQUAL(pipe.read(bytes), -1);
  memory.local_peers->region().ring(0, 1).consumed.store(1);
  CHECK_EQUAL(pipe.write(bytes, false), -1);
}
