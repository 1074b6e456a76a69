// The speed of this machine's memory for ranks that exchange tensors through chunks of shared memory.
//
//   memory_speed ranks=8 each=8 bytes=16777216 processors=2    ranks, of a host, bytes of a tensor
//
// Each processor does the work of its share of the ranks in turns, as Linux lets ranks have theirs: each rank has a
// tensor, and the shared memory of its host at an address of its own. The contents of the caches, and therefore the
// speed, depend on all of these numbers. Prints one JSON object: the bytes of a chunk, as the core chooses them on this
// machine, and megabytes per second which a processor copies between tensors and chunks, and which it reads to add up
// parts of chunks, both times the number of processors.
#include <sys/mman.h>

#include <barrier>
#include <cstring>
#include <memory>
#include <thread>

#include "base/system/machine.h"
#include "data/kernels/body.h"
#include "numbers.h"
#include "processes.h"
#include "transport/memory/shared_region.h"

namespace {

constexpr int fewest_passes = 7;  // whose best one counts: other work may run
constexpr double shortest = 1e6;  // microseconds of all passes
constexpr size_t least = size_t{32} << 20;  // bytes that a processor packs in a pass
constexpr double unmeasured = 1e18;  // microseconds

// The world, in bytes and ranks.
struct World {
  size_t ranks, each, bytes, chunk, processors;

  size_t part() const { return chunk / each / 64 * 64; }
  // Returns the distance between a chunk's parts in a tensor: they are a slice apart if there are several hosts.
  size_t distance() const { return ranks > each ? bytes / each / 64 * 64 : part(); }
  // Returns the distance between the parts of one member in successive chunks.
  size_t step() const { return ranks > each ? part() : chunk; }
  size_t rounds() const { return std::max(bytes / chunk, size_t{1}); }
  // Returns how many ranks the busiest processor serves, and how often these pass over their tensors.
  size_t ranks_a_processor() const { return (ranks + processors - 1) / processors; }
  size_t repetitions() const { return std::max(least / (ranks_a_processor() * rounds() * chunk), size_t{1}); }
  // Returns the bytes of the chunks of a host, of which each rank has two, in whole pages.
  size_t host_bytes() const {
    const auto page = static_cast<size_t>(page_bytes());
    return (2 * each * chunk + page - 1) / page * page;
  }
};

// A rank's tensor, and its view of the chunks of its host, of which each rank has two.
class Rank {
 public:
  Rank(const World& world, size_t number, int memory)
      : world_(world), own_(number % world.each), tensor_(world.bytes + world.chunk), sources_(world.each) {
    const auto begin = static_cast<off_t>(number / world.each * world.host_bytes());
    void* mapped = ::mmap(nullptr, world.host_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory, begin);
    must(mapped != MAP_FAILED, "no shared memory");
    chunks_ = static_cast<char*>(mapped);
  }

  void pack(size_t round) {
    for (size_t member = 0; member < world_.each; ++member)
      std::memcpy(part(own_, member, round), place(member, round), world_.part());
  }

  // Adds up this rank's part of all chunks, in its own one.
  void add_up(size_t round) {
    for (size_t member = 0; member < world_.each; ++member) sources_[member] = part(member, own_, round);
    const DTypeKernels& arithmetic = *kernels_of(DType::float32);
    arithmetic.reduce[SRT_SUM](part(own_, own_, round), sources_.data(), static_cast<int>(world_.each),
                               world_.part() / sizeof(float), {});
  }

  // Copies the sums of all members.
  void copy(size_t round) {
    for (size_t member = 0; member < world_.each; ++member)
      std::memcpy(place(member, round), part(member, member, round), world_.part());
  }

 private:
  char* part(size_t owner, size_t member, size_t round) {
    return chunks_ + (2 * owner + round % 2) * world_.chunk + member * world_.part();
  }
  char* place(size_t member, size_t round) {
    return tensor_.data() + member * world_.distance() + round * world_.step();
  }

  const World& world_;
  size_t own_;
  std::vector<char> tensor_;
  std::vector<const void*> sources_;
  char* chunks_;
};

struct Durations {
  double copying = 0, adding = 0;  // microseconds
};

class Processors {
 public:
  explicit Processors(const World& world) : world_(world), all_(static_cast<ptrdiff_t>(world.processors)) {
    const int memory = ::memfd_create("memory_speed", MFD_CLOEXEC);
    const size_t length = (world.ranks / world.each + 1) * world.host_bytes();
    must(memory >= 0 && ::ftruncate(memory, static_cast<off_t>(length)) == 0, "no shared memory");
    for (size_t number = 0; number < world.ranks; ++number)
      ranks_.push_back(std::make_unique<Rank>(world_, number, memory));
  }

  // Passes over all tensors. Returns the times of the slowest processor.
  Durations pass() {
    std::vector<Durations> took(world_.processors);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < took.size(); ++i) threads.emplace_back([&, i] { took[i] = run(i); });
    for (std::thread& thread : threads) thread.join();
    Durations longest;
    for (const Durations& one : took)
      longest = {std::max(longest.copying, one.copying), std::max(longest.adding, one.adding)};
    return longest;
  }

 private:
  Durations run(size_t processor) {
    Durations sum;
    for (size_t repetition = 0; repetition < world_.repetitions(); ++repetition)
      for (size_t round = 0; round < world_.rounds(); ++round) {
        sum.copying += timed(processor, [&](Rank& rank) { rank.pack(round); });
        sum.adding += timed(processor, [&](Rank& rank) { rank.add_up(round); });
        sum.copying += timed(processor, [&](Rank& rank) { rank.copy(round); });
      }
    return sum;
  }

  // Runs the same work of a processor's ranks, once all processors are there. Returns the time it takes.
  template <typename Work>
  double timed(size_t processor, Work&& work) {
    all_.arrive_and_wait();
    const auto begun = Clock::now();
    for (size_t rank = processor; rank < ranks_.size(); rank += world_.processors) work(*ranks_[rank]);
    return microseconds_since(begun);
  }

  const World& world_;
  std::barrier<> all_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

size_t chunk_bytes(int ranks) {
  const int64_t bytes = SharedRegion::fitting_chunk_bytes(second_level_cache_bytes(), ranks, online_cores());
  return static_cast<size_t>(bytes);
}

}  // namespace

int main(int argument_count, char** arguments) {
  const std::vector<std::string> names = {"ranks", "each", "bytes", "processors"};
  Numbers numbers({{"ranks", 8}, {"each", 8}, {"bytes", 16 << 20}, {"processors", 2}}, names);
  numbers.parse(argument_count, arguments);
  const auto number = [&](const std::string& name) { return static_cast<size_t>(numbers.get(name)); };
  const size_t each = std::min(number("each"), number("ranks"));
  const World world{number("ranks"), each, number("bytes"), chunk_bytes(static_cast<int>(each)), number("processors")};
  must(world.part() > 0, "a chunk is too small");
  Processors processors(world);
  Durations best{unmeasured, unmeasured};
  const auto begun = Clock::now();
  for (int pass = 0; pass < fewest_passes || microseconds_since(begun) < shortest; ++pass) {
    const Durations took = processors.pass();
    best = {std::min(best.copying, took.copying), std::min(best.adding, took.adding)};
  }
  const size_t rounds = world.ranks_a_processor() * world.repetitions() * world.rounds();
  const auto bytes = static_cast<double>(rounds * world.each * world.part() * world.processors);
  std::printf("{\"chunk\": %zu, \"memory\": %.0f, \"sums\": %.0f}\n", world.chunk, 2 * bytes / best.copying,
              bytes / best.adding);
}
