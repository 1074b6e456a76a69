// All-reduce between two hosts, compared with a plain stream over the same kind of connection: two processes that are
// configured to be on two hosts, linked by TCP over loopback, in turn with a stream in both directions (one thread per
// direction, 1 MiB at a time).
//
//   two_hosts [NAME=VALUE ...] [BYTES ...]     settings by name, as in sockets_per_link=2 or encrypt=1
//
// Prints one JSON object per size: times in microseconds as measured on rank 0, and "ratios": the stream's time divided
// by sirtaki's, block by block.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "connections.h"
#include "drivers.h"

namespace {

constexpr const char* name = "two_hosts";  // of the tensor
constexpr size_t write_bytes = 1 << 20;
constexpr size_t bytes_a_block = 64 << 20;  // moved in each block for each size, within these bounds
constexpr int most_calls = 200;
constexpr int blocks = 7;

void send_all(int socket, const char* from, size_t bytes) {
  while (bytes) {
    const ssize_t count = ::send(socket, from, std::min(bytes, write_bytes), MSG_NOSIGNAL);
    must(count > 0, "the plain stream broke");
    bytes -= static_cast<size_t>(count);
  }
}

void receive_all(int socket, char* to, size_t bytes) {
  while (bytes) {
    const ssize_t count = ::recv(socket, to, std::min(bytes, write_bytes), 0);
    must(count > 0, "the plain stream broke");
    bytes -= static_cast<size_t>(count);
  }
}

class Rank {
 public:
  Rank(int rank, const Workload& workload, const std::vector<Connection>& links, const Connection& stream)
      : rank_(rank), stream_(stream.ends[rank]), out_(write_bytes), in_(write_bytes) {
    const srt_peer peers[] = {{"first", 0, 0}, {"second", 0, 1}};
    const srt_topology topology{sizeof topology, rank, 2, 0, 1, rank, 2, peers};
    srt_error error{};
    must(srt_create(workload.config, &topology, &context_, &error) == SRT_OK, error.text);
    const bool encrypts = workload.get("encrypt") == "1";
    for (const Connection& link : links)
      if (encrypts) link_encrypted(link.ends[rank]);
      else must(srt_link_socket(context_, 1 - rank, link.ends[rank], &error) == SRT_OK, error.text);
    must(srt_start(context_, &error) == SRT_OK, error.text);
  }
  ~Rank() {
    srt_shutdown(context_, 10'000);
    srt_destroy(context_);
  }

  void measure(size_t bytes) {
    prepare(context_, name, data_, bytes, 2);
    Times core, stream, ratios;
    for (int i = 0; i <= blocks; ++i) {
      const double there = timed(bytes, [&] { exchange(bytes); });
      const double here = timed(bytes, [&] { allreduce(context_, name, data_); });
      if (i == 0) continue;  // the first block warms up
      core.push_back(here);
      stream.push_back(there);
      ratios.push_back(there / here);
    }
    if (rank_ == 0) print(bytes, core, stream, ratios);
  }

 private:
  // Links the ranks with encryption. They exchange their certificates' fingerprints over the stream, which belongs to
  // this program alone.
  void link_encrypted(int socket) {
    srt_error error{};
    srt_tls* tls = srt_tls_create(nullptr, &error);
    must(tls, error.text);
    uint8_t own[32], peer[32];
    srt_tls_fingerprint(tls, own);
    send_all(stream_, reinterpret_cast<const char*>(own), sizeof own);
    receive_all(stream_, reinterpret_cast<char*>(peer), sizeof peer);
    srt_tls_session* session = srt_tls_open(tls, socket, rank_, peer, &error);
    must(session, error.text);
    while (srt_tls_handshake(session, &error) == SRT_IN_PROGRESS) std::this_thread::yield();
    must(error.status == SRT_OK && srt_link_tls(context_, 1 - rank_, socket, session, &error) == SRT_OK, error.text);
    srt_tls_destroy(tls);
  }

  // Returns the microseconds per call, from a block of calls.
  template <typename Call>
  double timed(size_t bytes, Call&& call) {
    const int calls = static_cast<int>(std::clamp<size_t>(bytes_a_block / bytes, 1, most_calls));
    exchange(1);  // begin together
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) call();
    return microseconds_since(start) / calls;
  }

  void exchange(size_t bytes) {
    std::thread sender([&] { send_all(stream_, out_.data(), bytes); });
    receive_all(stream_, in_.data(), bytes);
    sender.join();
  }

  static void print(size_t bytes, const Times& core, const Times& stream, const Times& ratios) {
    std::printf("{\"bytes\": %zu, \"sirtaki_us\": %.1f, \"stream_us\": %.1f", bytes, median(core), median(stream));
    print_ratios(ratios);
  }

  int rank_, stream_;
  std::vector<char> out_, in_;
  srt_context* context_ = nullptr;
  std::vector<float> data_;
};

}  // namespace

int main(int argument_count, char** arguments) {
  Workload workload;
  workload.set("log_descriptor", "-1");
  workload.parse(1, argument_count, arguments, {1024, 65536, 1 << 20, 16 << 20, 64 << 20});
  std::vector<Connection> links(std::stoul(workload.get("sockets_per_link")));
  for (Connection& link : links) link = connect_over_loopback();
  const Connection stream = connect_over_loopback();
  const int rank = ::fork() == 0 ? 1 : 0;
  {
    Rank own(rank, workload, links, stream);
    for (size_t bytes : workload.sizes) own.measure(bytes);
  }
  if (rank == 1) std::_Exit(0);
  int status = 0;
  ::wait(&status);
  srt_config_destroy(workload.config);
  return status ? 1 : 0;
}
