// The bare call: N processes all-reduce float32 sums through the C header, of memory of their own and of memory that
// they share, in turn with the memory-bound prototype.
//
//   driver RANKS [SETTING=VALUE ...] [BYTES ...]   prints one JSON object a size; times in microseconds, as rank 0
//                                                  saw them
//
// They run in blocks, so that none evicts the others' caches; "ratios" and "shared_ratios" are the prototype's time
// divided by sirtaki's, block by block. "cold" is a call after a pause in which the engines fall asleep.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "drivers.h"
#include "memory_bound.h"

namespace {

constexpr const char* name = "driver";  // of the tensor
constexpr int block_calls = 16;
constexpr int least_calls = 48;
constexpr int most_calls = 3200;
constexpr size_t bytes_per_size = size_t{1} << 29;  // reduced for each size, within those bounds

// The state that the processes share from before they fork.
struct Setting {
  int ranks;
  memory_bound::Segment* segment;
  Workload workload;
  int memory;
  std::vector<int32_t> numbers, engine_bells, waiter_bells;

  bool is_crowded() const { return ranks > static_cast<int>(std::thread::hardware_concurrency()); }
};

// Binds the calling thread to a core of its own, as mpirun does; otherwise chance decides whether two ranks share one.
void bind(int rank) {
  cpu_set_t usable, own;
  if (::sched_getaffinity(0, sizeof usable, &usable) != 0) return;
  CPU_ZERO(&own);
  for (int core = 0, number = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &usable) && number++ == rank) CPU_SET(core, &own);
  ::sched_setaffinity(0, sizeof own, &own);
}

srt_context* join(const Setting& setting, int rank) {
  std::vector<srt_peer> peers(static_cast<size_t>(setting.ranks), srt_peer{"localhost", 0, 0});
  const srt_topology topology{sizeof topology, rank, setting.ranks, rank, setting.ranks, 0, 1, peers.data()};
  srt_memory memory{};
  memory.struct_size = sizeof memory;
  memory.fd = setting.memory;
  memory.slot = rank;
  memory.slot_count = setting.ranks;
  memory.ranks = setting.numbers.data();
  memory.engine_doorbells = setting.engine_bells.data();
  memory.waiter_doorbells = setting.waiter_bells.data();
  srt_context* context = nullptr;
  srt_error error{};
  must(srt_create(setting.workload.config, &topology, &context, &error) == SRT_OK, error.text);
  must(setting.ranks == 1 || srt_link_memory(context, &memory, &error) == SRT_OK, error.text);
  must(srt_start(context, &error) == SRT_OK, error.text);
  return context;
}

enum class Way { own_memory, shared_memory, prototype };

class Rank {
 public:
  Rank(const Setting& setting, int rank)
      : setting_(setting), rank_(rank), context_(join(setting, rank)),
        prototype_(setting.segment, rank, setting.ranks, setting.is_crowded()) {}

  ~Rank() {
    srt_shutdown(context_, 10'000);
    srt_destroy(context_);
  }

  void measure(size_t bytes) {
    prepare(context_, name, data_, bytes, setting_.ranks);
    srt_error error{};
    srt_buffer* buffer = srt_buffer_create(context_, static_cast<int64_t>(data_.size() * sizeof(float)), &error);
    must(buffer, error.text);
    shared_ = reinterpret_cast<float*>(srt_buffer_address(buffer));
    const int calls = static_cast<int>(std::clamp<size_t>(bytes_per_size / bytes, least_calls, most_calls));
    Times core, shared, bound, ratios, shared_ratios;
    for (int i = 0; i <= calls / block_calls; ++i) {
      const Times here = block(Way::own_memory), there = block(Way::prototype), shares = block(Way::shared_memory);
      if (i == 0) continue;  // the first block warms up
      core.insert(core.end(), here.begin(), here.end());
      bound.insert(bound.end(), there.begin(), there.end());
      shared.insert(shared.end(), shares.begin(), shares.end());
      ratios.push_back(median(there) / median(here));
      shared_ratios.push_back(median(there) / median(shares));
    }
    const Times cold = measure_cold();
    srt_buffer_destroy(buffer);
    if (rank_ != 0) return;
    std::printf("{\"ranks\": %d, \"bytes\": %zu, \"cold_us\": %.1f", setting_.ranks, bytes, median(cold));
    print("sirtaki", core);
    print("shared", shared);
    print("bound", bound);
    print_list("shared_ratios", shared_ratios);
    print_ratios(ratios);
  }

 private:
  Times block(Way way) {
    Times times;
    once(way);
    for (int i = 0; i < block_calls; ++i) times.push_back(once(way));
    return times;
  }

  Times measure_cold() {
    Times times;
    float one = 0;
    for (int i = 0; i < 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      prototype_.allreduce(&one, 1);  // the ranks wake at different times; the engines stay asleep
      times.push_back(once(Way::own_memory));
    }
    return times;
  }

  double once(Way way) {
    const auto start = Clock::now();
    if (way == Way::prototype) prototype_.allreduce(data_.data(), data_.size());
    else if (way == Way::own_memory) allreduce(context_, name, data_);
    else allreduce(context_, name, shared_, static_cast<int64_t>(data_.size()));
    return microseconds_since(start);
  }

  static void print(const char* who, const Times& times) {
    std::printf(", \"%s_us\": %.3f, \"%s_p99_us\": %.3f", who, median(times), who, quantile(times, 0.99));
  }

  const Setting& setting_;
  int rank_;
  srt_context* context_;
  memory_bound::Prototype prototype_;
  std::vector<float> data_;
  float* shared_ = nullptr;
};

Setting parse(int argument_count, char** arguments) {
  Setting setting{};
  setting.ranks = argument_count > 1 ? std::atoi(arguments[1]) : 2;
  must(setting.ranks >= 2 && setting.ranks <= memory_bound::most_ranks,
       "usage: driver RANKS [SETTING=VALUE ...] [BYTES ...]");
  setting.workload.parse(2, argument_count, arguments, {4, 1024, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20});
  return setting;
}

void share(Setting& setting) {
  void* shared =
      ::mmap(nullptr, sizeof(memory_bound::Segment), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  must(shared != MAP_FAILED, "no shared memory");
  setting.segment = static_cast<memory_bound::Segment*>(shared);
  setting.memory = srt_memory_create(setting.workload.config, setting.ranks, nullptr);
  must(setting.memory >= 0, "no shared memory");
  for (int rank = 0; rank < setting.ranks; ++rank) {
    setting.numbers.push_back(rank);
    setting.engine_bells.push_back(srt_doorbell_create(nullptr));
    setting.waiter_bells.push_back(srt_doorbell_create(nullptr));
  }
}

void run_rank(const Setting& setting, int number) {
  Rank rank(setting, number);
  if (!setting.is_crowded()) bind(number);
  for (const size_t bytes : setting.workload.sizes) rank.measure(bytes);
}

}  // namespace

int main(int argument_count, char** arguments) {
  Setting setting = parse(argument_count, arguments);
  share(setting);
  for (int rank = 1; rank < setting.ranks; ++rank)
    if (::fork() == 0) {
      run_rank(setting, rank);
      std::_Exit(0);
    }
  run_rank(setting, 0);
  int failed = 0, status = 0;
  while (::wait(&status) > 0) failed |= status;
  srt_config_destroy(setting.workload.config);
  return failed ? 1 : 0;
}
