// The costs of this machine, which simulated ranks are charged: of a message, of bytes in a stream, and of a look by a
// rank that waits.
//
//   calibrate processes=16    processes that share a processor: an even number
//
// Prints one JSON object: nanoseconds of the processor for a message of 64 bytes over loopback, from one process to
// another that sleeps, while all others exchange messages in pairs as well; megabytes per second of a processor that
// sends or receives a stream; nanoseconds of the processor for a look for events by one process, which then yields to
// the others, who do the same. The more processes there are, the less of each one the caches and the TLB hold when it
// has its turn.
#include <sched.h>
#include <sys/epoll.h>

#include <memory>

#include "connections.h"
#include "numbers.h"
#include "processes.h"

namespace {

constexpr int messages = 1'000, looks = 4'000;  // of all processes, in a round
constexpr int fewest = 8;  // of each process
constexpr int rounds = 15;  // of each measurement, whose best round counts: other work may run
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

// Times messages to and fro in each pair of processes.
double nanoseconds_a_message(Gate& gate, const std::vector<Connection>& connections, int process) {
  const auto pairs = static_cast<int>(connections.size()), each = std::max(messages / (2 * pairs), fewest);
  const int place = process % 2, socket = connections[static_cast<size_t>(process / 2)].ends[place];
  char message[64] = {};
  const double took = gate.timed(process, 2 * pairs, [&] {
    for (int i = 0; i < each; ++i) {
      move(socket, message, sizeof message, place == 0);
      move(socket, message, sizeof message, place == 1);
    }
  });
  return took * 1e3 / (2 * each * pairs);
}

// Times a stream from one process to the other on the same core, which sends and receives each byte. The caches hold
// none of them before.
double stream_speed(Gate& gate, const Connection& connection, int process) {
  const auto data = std::make_unique<char[]>(streamed);  // zeros, which are written here
  const double took = gate.timed(process, 2, [&] {
    for (size_t moved = 0; moved < streamed; moved += part)
      move(connection.ends[process], data.get() + moved, part, process == 0);
  });
  return 2 * static_cast<double>(streamed) / took;
}

// Times looks of all processes, in turns: each finds the caches as the others have left them.
double nanoseconds_a_look(Gate& gate, int process, int processes) {
  const int each = std::max(looks / processes, fewest);
  const int events = ::epoll_create1(EPOLL_CLOEXEC);
  must(events >= 0, "no epoll");
  epoll_event event;
  const double took = gate.timed(process, processes, [&] {
    for (int i = 0; i < each; ++i) {
      must(::epoll_wait(events, &event, 1, 0) == 0, "an event that nobody has made");
      ::sched_yield();
    }
  });
  ::close(events);
  return took * 1e3 / (processes * each);
}

}  // namespace

int main(int argument_count, char** arguments) {
  Numbers numbers({{"processes", 16}}, {"processes"});
  numbers.parse(argument_count, arguments);
  const int processes = numbers.small("processes");
  must(processes % 2 == 0, "processes= is an even number");
  Gate* pair = Gate::create(2);
  Gate* all = Gate::create(processes);
  std::vector<Connection> connections(static_cast<size_t>(processes / 2));
  std::generate(connections.begin(), connections.end(), connect_over_loopback);
  const bool went_well = run_processes(processes, [&](int process) {
    share_a_core();
    double message = 1e9, look = 1e9, stream = 0;
    for (int round = 0; round < rounds; ++round) {
      look = std::min(look, nanoseconds_a_look(*all, process, processes));
      message = std::min(message, nanoseconds_a_message(*all, connections, process));
      if (process < 2) stream = std::max(stream, stream_speed(*pair, connections.front(), process));
    }
    if (process != 0) return;
    std::printf("{\"message\": %.0f, \"stream\": %.0f, \"look\": %.0f}\n", message, stream, look);
    std::fflush(stdout);
  });
  return went_well ? 0 : 1;
}
