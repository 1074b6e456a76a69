// The costs of this machine, which simulated ranks are charged: of a message, of bytes in a stream, and of copies.
//
//   calibrate    prints one JSON object: nanoseconds of a processor for a message of 64 bytes over loopback, from one
//                process to another that sleeps; megabytes per second of a processor that sends or receives a stream;
//                megabytes per second that all processors copy
#include <sched.h>

#include <cstring>
#include <memory>
#include <thread>

#include "connections.h"
#include "processes.h"

namespace {

constexpr int messages = 500, rounds = 15;  // of each measurement, whose best round counts: other work may run
constexpr size_t copied = size_t{64} << 20, streamed = size_t{32} << 20, part = size_t{256} << 10;

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

// Times copies by all processors at once, within the memory of each.
double copy_speed(std::vector<std::vector<char>>& memories) {
  std::vector<std::thread> threads;
  const size_t count = memories.size() / 2;
  const auto start = Clock::now();
  for (size_t i = 0; i < count; ++i)
    threads.emplace_back([&, i] { std::memcpy(memories[2 * i].data(), memories[2 * i + 1].data(), copied); });
  for (std::thread& thread : threads) thread.join();
  return static_cast<double>(copied) * count / microseconds_since(start);
}

}  // namespace

int main() {
  Gate* gate = Gate::create(2);
  const Connection connection = connect_over_loopback();
  double copies = 0;
  std::vector<std::vector<char>> memories(2 * std::max(std::thread::hardware_concurrency(), 1u),
                                          std::vector<char>(copied, 1));
  for (int round = 0; round < rounds; ++round) copies = std::max(copies, copy_speed(memories));
  const bool went_well = run_processes(2, [&](int process) {
    share_a_core();
    double message = 1e9, stream = 0;
    for (int round = 0; round < rounds; ++round) {
      message = std::min(message, nanoseconds_a_message(*gate, connection, process));
      stream = std::max(stream, stream_speed(*gate, connection, process));
    }
    if (process == 0) std::printf("{\"message\": %.0f, \"stream\": %.0f, \"memory\": %.0f}\n", message, stream, copies);
    if (process == 0) std::fflush(stdout);
  });
  return went_well ? 0 : 1;
}
