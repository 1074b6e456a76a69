// The bare call: N processes all-reduce float32 sums through the C header, beside the limit prototype, in turn.
//
//   driver RANKS [BYTES ...]      prints one JSON object a size; times are medians of single calls in microseconds
//
// "cold" is a call after a pause in which the engines fall asleep.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "limit.h"
#include "sirtaki.h"

namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); }

double quantile(std::vector<double> times, double q) {
  std::sort(times.begin(), times.end());
  return times[std::min(times.size() - 1, static_cast<size_t>(q * static_cast<double>(times.size())))];
}

void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "driver: %s\n", what);
  std::_Exit(1);
}

// What the processes share before they part.
struct Setting {
  int ranks;
  limit::Segment* segment;
  srt_config* config;
  int memory;
  std::vector<int32_t> numbers, engine_bells, waiter_bells;
  std::vector<size_t> sizes;
};

srt_context* join(const Setting& setting, int rank) {
  std::vector<srt_peer> peers(static_cast<size_t>(setting.ranks), srt_peer{"localhost", 0, 0});
  srt_topology topology{sizeof topology, rank, setting.ranks, rank, setting.ranks, 0, 1, peers.data()};
  srt_memory memory{sizeof memory, setting.memory, 0, rank, setting.ranks, setting.numbers.data(), setting.engine_bells.data(), setting.waiter_bells.data(), nullptr, nullptr};
  srt_context* context = nullptr;
  srt_error error{};
  must(srt_create(setting.config, &topology, &context, &error) == SRT_OK, error.text);
  must(setting.ranks == 1 || srt_link_memory(context, &memory, &error) == SRT_OK, error.text);
  must(srt_start(context, &error) == SRT_OK, error.text);
  return context;
}

class Rank {
 public:
  Rank(const Setting& setting, int rank)
      : setting_(setting), rank_(rank), context_(join(setting, rank)),
        prototype_(setting.segment, rank, setting.ranks, setting.ranks > static_cast<int>(std::thread::hardware_concurrency())) {}
  ~Rank() {
    srt_shutdown(context_, 10'000);
    srt_destroy(context_);
  }

  void measure(size_t bytes) {
    const size_t count = std::max<size_t>(bytes / sizeof(float), 1);
    std::vector<float> data(count, 1.0f);
    run(data);
    must(data[0] == static_cast<float>(setting_.ranks) && data[count - 1] == data[0], "the sum is wrong");
    std::fill(data.begin(), data.end(), 0.0f);  // sums in place would overflow after many calls
    const int calls = static_cast<int>(std::clamp<size_t>((size_t{1} << 29) / std::max<size_t>(bytes, 1), 30, 3000));
    for (int i = 0; i < calls / 10 + 3; ++i) once(data, i % 2);
    std::vector<double> core, bound;
    for (int i = 0; i < calls; ++i) {  // in blocks, so that the one does not cool the other's caches
      if (i % 16 == 0) once(data, 0);
      core.push_back(once(data, 0));
      if (i % 16 == 15 || i + 1 == calls)
        for (once(data, 1); bound.size() < core.size();) bound.push_back(once(data, 1));
    }
    std::vector<double> cold;
    for (int i = 0; i < 20 && bytes <= 1 << 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      cold.push_back(once(data, 0));
    }
    if (rank_) return;
    std::printf("{\"ranks\": %d, \"bytes\": %zu, \"sirtaki_us\": %.2f, \"sirtaki_p99_us\": %.2f, \"limit_us\": %.2f, \"limit_over_sirtaki\": %.3f, \"algbw\": %.3f, \"cold_us\": %.1f}\n",
                setting_.ranks, bytes, quantile(core, .5), quantile(core, .99), quantile(bound, .5), quantile(bound, .5) / quantile(core, .5),
                static_cast<double>(bytes) / quantile(core, .5) / 1e3, cold.empty() ? 0.0 : quantile(cold, .5));
    std::fflush(stdout);
  }

 private:
  double once(std::vector<float>& data, int which) {
    const auto start = Clock::now();
    if (which) prototype_.allreduce(data.data(), data.size());
    else run(data);
    return microseconds_since(start);
  }

  void run(std::vector<float>& data) {
    const auto count = static_cast<int64_t>(data.size());
    srt_request request{};
    request.struct_size = sizeof request;
    request.kind = SRT_ALLREDUCE;
    request.dtype = 10;  // float32
    request.device = -1;
    request.name = "driver";
    request.dimensions = 1;
    request.shape = &count;
    request.prescale = request.postscale = 1.0;
    request.input = request.output = reinterpret_cast<uintptr_t>(data.data());
    srt_handle handle = 0;
    srt_error error{};
    must(srt_run(context_, &request, 1, 60'000, &handle, &error) == SRT_OK, error.text);
    srt_release(context_, &handle, 1);
  }

  const Setting& setting_;
  int rank_;
  srt_context* context_;
  limit::Prototype prototype_;
};

}  // namespace

int main(int argument_count, char** arguments) {
  Setting setting;
  setting.ranks = argument_count > 1 ? std::atoi(arguments[1]) : 2;
  must(setting.ranks >= 1 && setting.ranks <= limit::most_ranks, "usage: driver RANKS [BYTES ...]");
  for (int i = 2; i < argument_count; ++i) setting.sizes.push_back(std::stoull(arguments[i]));
  if (setting.sizes.empty()) setting.sizes = {4, 1024, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  void* shared = ::mmap(nullptr, sizeof(limit::Segment), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  must(shared != MAP_FAILED, "no shared memory");
  setting.segment = static_cast<limit::Segment*>(shared);
  setting.config = srt_config_create();
  setting.memory = srt_memory_create(srt_memory_bytes(setting.config, setting.ranks), nullptr);
  must(setting.memory >= 0, "no shared memory");
  for (int rank = 0; rank < setting.ranks; ++rank) {
    setting.numbers.push_back(rank);
    setting.engine_bells.push_back(srt_doorbell_create(nullptr));
    setting.waiter_bells.push_back(srt_doorbell_create(nullptr));
  }
  for (int rank = 1; rank < setting.ranks; ++rank)
    if (::fork() == 0) {
      Rank process(setting, rank);
      for (size_t bytes : setting.sizes) process.measure(bytes);
      process.~Rank();
      std::_Exit(0);
    }
  {
    Rank process(setting, 0);
    for (size_t bytes : setting.sizes) process.measure(bytes);
  }
  int failed = 0, status = 0;
  while (::wait(&status) > 0) failed |= status;
  return failed ? 1 : 0;
}
