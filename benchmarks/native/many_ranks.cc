// Steps of many real ranks on this machine, to compare with simulated ones: processes that are configured to be on
// several hosts, `each` ranks on each, linked by TCP over loopback, and by shared memory within such a host.
//
//   many_ranks ranks=64 each=8 barriers=100 steps=5       barriers only: negotiation without data
//   many_ranks ranks=16 each=8 bytes=1048576 steps=5      one all-reduce a step
//   many_ranks ranks=8 each=8 worlds=2 barriers=1         two worlds side by side, which know nothing of each other
//
// Worlds side by side share the processors: the ranks of each wake each other on all of them, as in one world.
// All ranks begin a step at the same moment; it ends when the last one has finished. Prints one JSON object:
// microseconds of the first step, and of each following one; the bytes that rank 0 (of the first world) has sent over
// TCP in all steps.
#include <cstring>
#include <string>
#include <string_view>

#include "connections.h"
#include "numbers.h"
#include "processes.h"
#include "sirtaki_observe.h"

namespace {

Numbers arguments_with_defaults() {
  return {{{"ranks", 8}, {"each", 8}, {"worlds", 1}, {"barriers", 0}, {"bytes", 0}, {"steps", 5}, {"fan_out", 16}},
          {"ranks", "each", "worlds", "steps", "fan_out"}};
}

// The configuration that the processes share from before they fork. The processes of a world follow one another.
struct Setting {
  Numbers numbers = arguments_with_defaults();
  int ranks = 0, each = 0, worlds = 0;
  srt_config* config = srt_config_create();
  Gate* gate = nullptr;
  std::vector<srt_peer> peers;
  std::vector<int> memories;  // by world and host
  std::vector<int32_t> engine_bells, waiter_bells;  // by process
  std::vector<std::vector<std::pair<int, int>>> sockets;  // by process: peer and descriptor

  int processes() const { return worlds * ranks; }
  int hosts() const { return host_of(ranks - 1) + 1; }
  int host_of(int rank) const { return rank / each; }
  int first_of(int host) const { return host * each; }
  int size_of(int host) const { return std::min(each, ranks - first_of(host)); }
};

void set(Setting& setting, const char* name, const std::string& value) {
  srt_error error{};
  must(srt_config_set(setting.config, name, value.c_str(), &error) == SRT_OK, error.text);
}

// Connects all pairs of a world, or, for barriers, the ranks of different hosts that report to one another.
void connect(Setting& setting, int world) {
  const auto sockets_of = [&](int rank) -> auto& {
    return setting.sockets[static_cast<size_t>(world * setting.ranks + rank)];
  };
  const bool only_leaders = setting.numbers.get("barriers") > 0;
  for (int rank = 0; rank < setting.ranks; ++rank) {
    for (int lower = 0; lower < rank; ++lower) {
      if (only_leaders && (rank % setting.each || lower % setting.each)) continue;
      const Connection made = connect_over_loopback();
      sockets_of(lower).emplace_back(rank, made.ends[0]);
      sockets_of(rank).emplace_back(lower, made.ends[1]);
    }
  }
}

void prepare(Setting& setting, int argument_count, char** arguments) {
  setting.numbers.parse(argument_count, arguments);
  setting.ranks = setting.numbers.small("ranks");
  setting.each = setting.numbers.small("each");
  setting.worlds = setting.numbers.small("worlds");
  must(setting.numbers.get("barriers") || setting.numbers.get("bytes") >= 4, "barriers=, or bytes= of 4 or more");
  set(setting, "log_descriptor", "-1");
  set(setting, "control_fan_out", std::to_string(setting.numbers.get("fan_out")));
  setting.gate = Gate::create(setting.processes());
  setting.sockets.resize(static_cast<size_t>(setting.processes()));
  for (int rank = 0; rank < setting.ranks; ++rank) setting.peers.push_back({"localhost", rank, setting.host_of(rank)});
  for (int process = 0; process < setting.processes(); ++process) {
    setting.engine_bells.push_back(srt_doorbell_create(nullptr));
    setting.waiter_bells.push_back(srt_doorbell_create(nullptr));
  }
  for (int i = 0; i < setting.worlds * setting.hosts(); ++i) {
    const int size = setting.size_of(i % setting.hosts());
    setting.memories.push_back(size > 1 ? srt_memory_create(setting.config, size, nullptr) : -1);
    must(size == 1 || setting.memories.back() >= 0, "no shared memory");
  }
  for (int world = 0; world < setting.worlds; ++world) connect(setting, world);
}

void link_memory(const Setting& setting, srt_context* context, int world, int rank) {
  const int host = setting.host_of(rank), first = setting.first_of(host);
  const int process = world * setting.ranks + first;  // of the first rank of the host
  std::vector<int32_t> numbers;
  for (int slot = 0; slot < setting.size_of(host); ++slot) numbers.push_back(first + slot);
  srt_memory memory{};
  memory.struct_size = sizeof memory;
  memory.fd = setting.memories[static_cast<size_t>(world * setting.hosts() + host)];
  memory.slot = rank - first;
  memory.slot_count = setting.size_of(host);
  memory.ranks = numbers.data();
  memory.engine_doorbells = setting.engine_bells.data() + process;
  memory.waiter_doorbells = setting.waiter_bells.data() + process;
  srt_error error{};
  must(memory.slot_count == 1 || srt_link_memory(context, &memory, &error) == SRT_OK, error.text);
}

srt_context* join(const Setting& setting, int process) {
  const int world = process / setting.ranks, rank = process % setting.ranks, host = setting.host_of(rank);
  const srt_topology topology{sizeof topology,       rank, setting.ranks,   rank - setting.first_of(host),
                              setting.size_of(host), host, setting.hosts(), setting.peers.data()};
  srt_context* context = nullptr;
  srt_error error{};
  must(srt_create(setting.config, &topology, &context, &error) == SRT_OK, error.text);
  link_memory(setting, context, world, rank);
  for (int other = 0; other < setting.processes(); ++other)
    for (const auto& [peer, descriptor] : setting.sockets[static_cast<size_t>(other)])
      if (other != process) ::close(descriptor);
      else must(srt_link_socket(context, peer, descriptor, &error) == SRT_OK, error.text);
  must(srt_start(context, &error) == SRT_OK, error.text);
  return context;
}

// The requests of one step.
class Step {
 public:
  explicit Step(const Setting& setting) : data_(static_cast<size_t>(setting.numbers.get("bytes")) / sizeof(float)) {
    const int64_t barriers = setting.numbers.get("barriers");
    for (int64_t i = 0; i < std::max<int64_t>(barriers, 1); ++i)
      names_.push_back("allreduce.model.layers." + std::to_string(i) + ".weight");
    count_ = static_cast<int64_t>(data_.size());
    for (const std::string& name : names_) {
      srt_request request{};
      request.struct_size = sizeof request;
      request.kind = barriers ? SRT_BARRIER : SRT_ALLREDUCE;
      request.dtype = 10;  // float32
      request.device = -1;
      request.name = name.c_str();
      request.dimensions = barriers ? 0 : 1;
      request.shape = &count_;
      request.prescale = request.postscale = 1.0;
      if (!barriers) request.input = request.output = reinterpret_cast<uintptr_t>(data_.data());
      requests_.push_back(request);
    }
    handles_.resize(requests_.size());
  }

  void run(srt_context* context) {
    const auto count = static_cast<int32_t>(requests_.size());
    srt_error error{};
    must(srt_run(context, requests_.data(), count, 300'000, handles_.data(), &error) == SRT_OK, error.text);
    srt_release(context, handles_.data(), count);
  }

 private:
  std::vector<float> data_;  // zeros
  int64_t count_ = 0;
  std::vector<std::string> names_;
  std::vector<srt_request> requests_;
  std::vector<srt_handle> handles_;
};

int64_t sent_over_tcp(srt_context* context) {
  srt_sent_bytes rows[1024];
  int64_t total = 0;
  for (int32_t row = 0, count = std::min(srt_count_sent_bytes(context, rows, 1024), 1024); row < count; ++row)
    if (std::string_view(rows[row].transport) == "tcp") total += rows[row].bytes;
  return total;
}

void run_rank(const Setting& setting, int process) {
  srt_context* context = join(setting, process);
  Step step(setting);
  Times times;
  for (int64_t i = 0; i <= setting.numbers.get("steps"); ++i)
    times.push_back(setting.gate->timed(process, setting.processes(), [&] { step.run(context); }));
  if (process == 0) {
    std::printf("{\"first\": %.1f, \"sent\": %lld", times[0], static_cast<long long>(sent_over_tcp(context)));
    print_list("steady", {times.begin() + 1, times.end()});
    std::printf("}\n");
    std::fflush(stdout);
  }
  srt_shutdown(context, 60'000);
  srt_destroy(context);
}

}  // namespace

int main(int argument_count, char** arguments) {
  Setting setting;
  prepare(setting, argument_count, arguments);
  const bool went_well = run_processes(setting.processes(), [&](int process) { run_rank(setting, process); });
  return went_well ? 0 : 1;
}
