// The costs of this machine, which simulated ranks are charged: of a message, of bytes in a stream, and of a look by a
// rank that waits.
//
//   calibrate    prints one JSON object: nanoseconds of a processor for a message of 64 bytes over loopback, from one
//                process to another that sleeps; megabytes per second of a processor that sends or receives a stream;
//                nanoseconds of a processor that looks for events and then yields to one of many that do the same
#include <sched.h>
#include <sys/epoll.h>

#include <memory>

#include "connections.h"
#include "processes.h"

namespace {

constexpr int messages = 500, looks = 250, lookers = 16;
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

// Times looks of many processes on the same core, in turns: each finds the caches as the others have left them.
double nanoseconds_a_look(Gate& gate, int process) {
  const int events = ::epoll_create1(EPOLL_CLOEXEC);
  must(events >= 0, "no epoll");
  epoll_event event;
  const double took = gate.timed(process, lookers, [&] {
    for (int i = 0; i < looks; ++i) {
      must(::epoll_wait(events, &event, 1, 0) == 0, "an event that nobody has made");
      ::sched_yield();
    }
  });
  ::close(events);
  return took * 1e3 / (lookers * looks);
}

}  // namespace

int main() {
  Gate* pair = Gate::create(2);
  Gate* all = Gate::create(lookers);
  const Connection connection = connect_over_loopback();
  const bool went_well = run_processes(lookers, [&](int process) {
    share_a_core();
    double message = 1e9, look = 1e9, stream = 0;
    for (int round = 0; round < rounds; ++round) {
      look = std::min(look, nanoseconds_a_look(*all, process));
      if (process >= 2) continue;
      message = std::min(message, nanoseconds_a_message(*pair, connection, process));
      stream = std::max(stream, stream_speed(*pair, connection, process));
    }
    if (process != 0) return;
    std::printf("{\"message\": %.0f, \"stream\": %.0f, \"look\": %.0f}\n", message, stream, look);
    std::fflush(stdout);
  });
  return went_well ? 0 : 1;
}
