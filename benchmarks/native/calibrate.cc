// The costs of this machine, which simulated ranks are charged: of a message, of bytes in a stream, of copies and sums,
// and of a look by a rank that waits.
//
//   calibrate    prints one JSON object: nanoseconds of a processor for a message of 64 bytes over loopback, from one
//                process to another that sleeps; megabytes per second of a processor that sends or receives a stream;
//                megabytes per second that all processors copy, and that they read to add up eight arrays; nanoseconds
//                of a processor that looks for events and then yields to another process that does the same
#include <sched.h>
#include <sys/epoll.h>

#include <cstring>
#include <memory>
#include <thread>

#include "connections.h"
#include "processes.h"

namespace {

constexpr int messages = 500, looks = 2000;
constexpr int rounds = 15;  // of each measurement, whose best round counts: other work may run
constexpr size_t arrays = 8;  // that are added up
constexpr size_t streamed = size_t{32} << 20, part = size_t{256} << 10;

void share_a_core() {
  cpu_set_t usable, one;
  must(::sched_getaffinity(0, sizeof usable, &usable) == 0, "no processor");
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core)
    if (CPU_ISSET(core, &usable)) CPU_SET(core, &one);
  ::sched_setaffinity(0, sizeof one, &one);
}

void move(int socket, char* data, size_t bytes, bool sends) {
  while (bytes) {
    const size_t most = std::min(bytes, part);
    const ssize_t count = sends ? ::send(socket, data, most, MSG_NOSIGNAL) : ::recv(socket, data, most, 0);
    must(count > 0, "the connection broke");
    bytes -= static_cast<size_t>(count);
  }
}

// Times a message to and fro, both processes on one core: it sends and receives two.
double nanoseconds_a_message(Gate& gate, const Connection& connection, int process) {
  char message[64] = {};
  const double took = gate.timed(process, 2, [&] {
    for (int i = 0; i < messages; ++i) {
      move(connection.ends[process], message, sizeof message, process == 0);
      move(connection.ends[process], message, sizeof message, process == 1);
    }
  });
  return took * 1e3 / (2 * messages);
}

// Times a stream from one process to the other on the same core, which sends and receives each byte.
double stream_speed(Gate& gate, const Connection& connection, int process) {
  const auto data = std::make_unique<char[]>(part);
  const double took = gate.timed(process, 2, [&] {
    for (size_t moved = 0; moved < streamed; moved += part)
      move(connection.ends[process], data.get(), part, process == 0);
  });
  return 2 * static_cast<double>(streamed) / took;
}

// Times looks of two processes on the same core, in turns.
double nanoseconds_a_look(Gate& gate, int process) {
  const int events = ::epoll_create1(EPOLL_CLOEXEC);
  must(events >= 0, "no epoll");
  epoll_event event;
  const double took = gate.timed(process, 2, [&] {
    for (int i = 0; i < looks; ++i) {
      must(::epoll_wait(events, &event, 1, 0) == 0, "an event that nobody has made");
      ::sched_yield();
    }
  });
  ::close(events);
  return took * 1e3 / (2 * looks);
}

void add_up(float* sum, const float* parts, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float total = 0;
    for (size_t array = 0; array < arrays; ++array) total += parts[array * count + i];
    sum[i] = total;
  }
}

// The memory of each processor, in two halves, which are larger than its caches.
using Memories = std::vector<std::vector<float>>;

Memories make_memories() {
  constexpr size_t most = size_t{64} << 20, of_all = size_t{512} << 20, least = size_t{8} << 20;
  const size_t processors = std::max(std::thread::hardware_concurrency(), 1u);
  return Memories(processors, std::vector<float>(2 * std::clamp(of_all / processors, least, most) / sizeof(float), 1));
}

// Times work of all processors at once, each of which passes over its half of memory. Returns its MB/s.
template <typename Work>
double speed_of_all(Memories& memories, Work&& work) {
  std::vector<std::thread> threads;
  const auto start = Clock::now();
  for (std::vector<float>& memory : memories) threads.emplace_back([&] { work(memory); });
  for (std::thread& thread : threads) thread.join();
  const size_t bytes = memories.size() * memories[0].size() * sizeof(float) / 2;
  return static_cast<double>(bytes) / microseconds_since(start);
}

double copy_speed(Memories& memories) {
  return speed_of_all(memories, [](std::vector<float>& memory) {
    std::memcpy(memory.data(), memory.data() + memory.size() / 2, memory.size() / 2 * sizeof(float));
  });
}

double sum_speed(Memories& memories) {
  return speed_of_all(memories, [](std::vector<float>& memory) {
    add_up(memory.data(), memory.data() + memory.size() / 2, memory.size() / 2 / arrays);
  });
}

std::pair<double, double> speeds_of_memory() {
  Memories memories = make_memories();
  double copies = 0, sums = 0;
  for (int round = 0; round < rounds; ++round) {
    copies = std::max(copies, copy_speed(memories));
    sums = std::max(sums, sum_speed(memories));
  }
  return {copies, sums};
}

}  // namespace

int main() {
  Gate* gate = Gate::create(2);
  const Connection connection = connect_over_loopback();
  const std::pair<double, double> memory = speeds_of_memory();
  const bool went_well = run_processes(2, [&](int process) {
    share_a_core();
    double message = 1e9, look = 1e9, stream = 0;
    for (int round = 0; round < rounds; ++round) {
      message = std::min(message, nanoseconds_a_message(*gate, connection, process));
      stream = std::max(stream, stream_speed(*gate, connection, process));
      look = std::min(look, nanoseconds_a_look(*gate, process));
    }
    if (process != 0) return;
    std::printf("{\"message\": %.0f, \"stream\": %.0f, \"memory\": %.0f, \"sums\": %.0f, \"look\": %.0f}\n", message,
                stream, memory.first, memory.second, look);
    std::fflush(stdout);
  });
  return went_well ? 0 : 1;
}
