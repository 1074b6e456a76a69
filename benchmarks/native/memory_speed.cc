// The speed of this machine's memory for ranks that exchange tensors through chunks of shared memory.
//
//   memory_speed ranks=8 each=8 bytes=16777216    ranks, of a host, bytes of a tensor
//
// What the caches hold depends on all of these numbers. Each processor does the work of its share of the ranks in
// turns, as Linux lets ranks have theirs: each rank has a tensor, and the shared memory of its host at an address of
// its own. Prints one JSON object: the bytes of a chunk, as the core chooses them on this machine, and megabytes per
// second of all processors, which they copy between tensors and chunks, and which they read to add up parts of chunks.
#include <sys/mman.h>

#include <barrier>
#include <cstring>
#include <memory>
#include <thread>

#include "base/machine.h"
#include "numbers.h"
#include "processes.h"
#include "transport/shared_region.h"

namespace {

constexpr int fewest_passes = 7;  // whose best one counts: other work may run
constexpr double shortest = 1e6;  // microseconds of all passes
constexpr size_t least = size_t{32} << 20;  // bytes that a processor copies in a pass
constexpr double never = 1e18;  // microseconds

// The world, in bytes and ranks.
struct World {
  size_t ranks, each, bytes, chunk, processors = std::max(std::thread::hardware_concurrency(), 1u);

  size_t part() const { return chunk / each / 64 * 64; }
  // Returns the distance between a chunk's parts in a tensor: they are a slice apart if there are several hosts.
  size_t distance() const { return ranks > each ? bytes / each / 64 * 64 : part(); }
  // Returns the distance between the parts of one member in successive chunks.
  size_t step() const { return ranks > each ? part() : chunk; }
  size_t rounds() const { return std::max(bytes / chunk, size_t{1}); }
  size_t repetitions() const { return std::max(least * processors / (ranks * bytes), size_t{1}); }
};

// A rank's tensor, and its view of the chunks of its host, of which each rank has two.
class Rank {
 public:
  Rank(const World& world, size_t number, int memory)
      : world_(world), own_(number % world.each), tensor_(world.bytes + world.chunk) {
    const size_t length = 2 * world.each * world.chunk;
    const auto begin = static_cast<off_t>(number / world.each * length);
    void* mapped = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, memory, begin);
    must(mapped != MAP_FAILED, "no shared memory");
    chunks_ = static_cast<char*>(mapped);
  }

  void pack(size_t round) {
    for (size_t member = 0; member < world_.each; ++member)
      std::memcpy(part(own_, member, round), place(member, round), world_.part());
  }

  void copy(size_t round) {
    for (size_t member = 0; member < world_.each; ++member)
      if (member != own_) std::memcpy(place(member, round), part(member, own_, round), world_.part());
  }

  void add_up(size_t round) {
    constexpr size_t block = 1024;
    auto* sums = reinterpret_cast<float*>(place(own_, round));
    for (size_t begin = 0, count = world_.part() / sizeof(float); begin < count; begin += block) {
      float total[block] = {};
      const size_t end = std::min(begin + block, count);
      for (size_t member = 0; member < world_.each; ++member) {
        const auto* numbers = reinterpret_cast<const float*>(part(member, own_, round));
        for (size_t i = begin; i < end; ++i) total[i - begin] += numbers[i];
      }
      std::copy_n(total, end - begin, sums + begin);
    }
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
  char* chunks_;
};

struct Durations {
  double copying = 0, adding = 0;  // microseconds
};

class Processors {
 public:
  explicit Processors(const World& world) : world_(world), all_(static_cast<ptrdiff_t>(world.processors)) {
    const int memory = ::memfd_create("memory_speed", MFD_CLOEXEC);
    const size_t length = 2 * world.chunk * (world.ranks + world.each);
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
  using namespace sirtaki;
  const int64_t bytes = SharedRegion::fitting_chunk_bytes(second_level_cache_bytes(), ranks, online_cores());
  return static_cast<size_t>(bytes);
}

}  // namespace

int main(int argument_count, char** arguments) {
  Numbers numbers({{"ranks", 8}, {"each", 8}, {"bytes", 16 << 20}}, {"ranks", "each", "bytes"});
  numbers.parse(argument_count, arguments);
  const auto number = [&](const std::string& name) { return static_cast<size_t>(numbers.get(name)); };
  const size_t each = std::min(number("each"), number("ranks"));
  const World world{number("ranks"), each, number("bytes"), chunk_bytes(static_cast<int>(each))};
  must(world.part() > 0, "a chunk is too small");
  Processors processors(world);
  Durations best{never, never};
  const auto begun = Clock::now();
  for (int pass = 0; pass < fewest_passes || microseconds_since(begun) < shortest; ++pass) {
    const Durations took = processors.pass();
    best = {std::min(best.copying, took.copying), std::min(best.adding, took.adding)};
  }
  const size_t parts = world.ranks * world.repetitions() * world.rounds();
  const auto chunks = static_cast<double>(parts * world.each * world.part());
  const auto copied = static_cast<double>(parts * (2 * world.each - 1) * world.part());
  std::printf("{\"chunk\": %zu, \"memory\": %.0f, \"sums\": %.0f}\n", world.chunk, copied / best.copying,
              chunks / best.adding);
}
