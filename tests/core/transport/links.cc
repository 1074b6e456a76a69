// Framing over a pipe that moves a few bytes at a time, and a link's handling of malformed bytes.
#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <random>

#include "base/codec.h"
#include "check.h"
#include "transport/links/links.h"
#include "transport/sockets/socket_pipe.h"
#include "transport/sockets/tcp.h"

using namespace sirtaki;

namespace {

// Two ends in one process; each call moves a number of bytes that a seeded generator chooses.
struct Channel {
  std::deque<uint8_t> bytes;
  bool ended = false;
};

class DrippingPipe final : public BytePipe {
 public:
  DrippingPipe(Channel& out, Channel& in, unsigned seed) : out_(out), in_(in), random_(seed) {}
  ptrdiff_t write(std::span<const uint8_t> bytes, bool) override {
    const size_t count = std::min<size_t>(bytes.size(), random_() % 40);
    out_.bytes.insert(out_.bytes.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count));
    return static_cast<ptrdiff_t>(count);
  }
  ptrdiff_t read(std::span<uint8_t> bytes) override {
    if (in_.bytes.empty()) return in_.ended ? -1 : 0;
    const size_t count = std::min({bytes.size(), in_.bytes.size(), size_t{1} + random_() % 60});
    std::copy_n(in_.bytes.begin(), count, bytes.begin());
    in_.bytes.erase(in_.bytes.begin(), in_.bytes.begin() + static_cast<ptrdiff_t>(count));
    return static_cast<ptrdiff_t>(count);
  }

 private:
  Channel& out_;
  Channel& in_;
  std::mt19937 random_;
};

struct Pair {
  explicit Pair(unsigned seed)
      : a(std::make_unique<DrippingPipe>(ab, ba, seed)), b(std::make_unique<DrippingPipe>(ba, ab, seed + 1)) {}
  Channel ab, ba;
  Link a, b;
};

}  // namespace

TEST(frames_arrive_whole_and_in_order) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    Pair pair(seed);
    std::mt19937 random(seed);
    uint64_t sent = 0, got = 0;
    while (got < 200) {
      if (sent < 200 && random() % 2) {
        Bytes body(random() % 300, static_cast<uint8_t>(sent));
        pair.a.send({.kind = FrameKind::data, .step = static_cast<uint16_t>(sent), .plan = sent}, body);
        ++sent;
      }
      pair.a.flush();
      pair.b.receive();
      const Frame* frame = nullptr;
      CHECK(pair.b.front(frame).is_ok());
      if (!frame) continue;
      CHECK_EQUAL(frame->header.plan, got);
      CHECK_EQUAL(reinterpret_cast<uintptr_t>(frame->body.data()) % 16, uintptr_t{0});
      CHECK(std::all_of(frame->body.begin(), frame->body.end(),
                        [&](uint8_t byte) { return byte == static_cast<uint8_t>(got); }));
      pair.b.pop();
      ++got;
    }
    CHECK_EQUAL(pair.a.unsent(), size_t{0});
  }
}

TEST(the_last_words_are_read_before_the_end) {
  Pair pair(5);
  pair.a.send({.kind = FrameKind::abort}, Bytes(100, 7));
  while (pair.a.unsent()) pair.a.flush();
  pair.ab.ended = true;
  const Frame* frame = nullptr;
  for (int i = 0; i < 100 && !frame; ++i) {
    pair.b.receive();
    CHECK(pair.b.front(frame).is_ok());
  }
  CHECK(frame != nullptr);
  CHECK(!pair.b.is_ended());
  pair.b.pop();
  pair.b.receive();
  CHECK(pair.b.is_ended());
}

// Reused memory still holds bytes that were sent to another peer.
TEST(padding_is_zero) {
  Channel out, in;
  Link link(std::make_unique<DrippingPipe>(out, in, 1));
  const Bytes earlier(1'000, 0xff), body(3, 0x11);
  for (const bool is_elsewhere : {false, true}) {
    link.send({.kind = FrameKind::data}, earlier);
    while (link.unsent()) link.flush();
    out.bytes.clear();
    if (is_elsewhere) {
      link.begin({.length = 3, .kind = FrameKind::data});
      link.add_elsewhere(body);
    } else {
      link.send({.kind = FrameKind::data}, body);
    }
    while (link.unsent()) link.flush();
    REQUIRE(out.bytes.size() == sizeof(FrameHeader) + padded(3));
    CHECK_EQUAL(std::count(out.bytes.end() - 13, out.bytes.end(), 0), 13);
  }
}

TEST(an_impossible_header_is_refused) {
  for (const FrameHeader& header :
       {FrameHeader{longest_frame + 1, FrameKind::data, 0, 0}, FrameHeader{0, static_cast<FrameKind>(0), 0, 0},
        FrameHeader{0, static_cast<FrameKind>(99), 0, 0}}) {
    Pair pair(1);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&header);
    pair.ab.bytes.assign(bytes, bytes + sizeof header);
    const Frame* frame = nullptr;
    Status status;
    for (int i = 0; i < 100 && status.is_ok(); ++i) {
      pair.b.receive();
      status = pair.b.front(frame);
    }
    CHECK_EQUAL(status.code(), SRT_PROTOCOL);
    CHECK(!frame);
  }
}

TEST(a_queue_of_bytes_makes_room_in_front) {
  ByteQueue queue;
  Bytes expected(3'000);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<uint8_t>(i * 7);
  std::ranges::copy(expected, queue.extend(expected.size()).begin());
  queue.consume(2'500);
  expected.erase(expected.begin(), expected.begin() + 2'500);
  std::ranges::fill(queue.extend(3'000), uint8_t{5});  // does not fit behind the queued bytes, but does in front
  expected.resize(3'500, 5);
  CHECK(std::ranges::equal(queue.front(), expected));
}

TEST(a_queue_of_bytes_keeps_them_in_order) {
  ByteQueue queue;
  std::mt19937 random(3);
  uint8_t next_in = 0, next_out = 0;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 2)
      for (uint8_t& byte : queue.extend(random() % 500)) byte = next_in++;
    const size_t count = std::min<size_t>(queue.size(), random() % 600);
    for (uint8_t byte : queue.front().first(count)) CHECK_EQUAL(byte, next_out++);
    queue.consume(count);
  }
}

// Bodies of various lengths, with or without a registered destination, in parts of which some are copied and some are
// not.
TEST(bodies_go_from_place_to_place) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    Pair pair(seed);
    std::mt19937 random(seed);
    for (uint64_t number = 0; number < 60; ++number) {
      const size_t length = random() % 20 * 16 + (random() % 4 ? 0 : 5), cut = length ? random() % length : 0;
      Bytes body(length), place(length);
      for (uint8_t& byte : body) byte = static_cast<uint8_t>(random());
      const FrameHeader header{static_cast<uint32_t>(length), FrameKind::data, 7, number};
      if (random() % 2) pair.a.send({.kind = FrameKind::decision}, Bytes(random() % 100, 1));
      pair.a.begin(header);
      std::copy_n(body.begin(), cut, pair.a.add(cut).begin());
      pair.a.add_elsewhere(std::span(body).subspan(cut));
      const Frame* frame = nullptr;
      while (!frame || frame->header.kind != FrameKind::data) {
        if (frame) pair.b.pop();
        if (random() % 3) pair.b.place(header, place);
        pair.a.flush();
        pair.b.receive();
        CHECK(pair.b.front(frame).is_ok());
      }
      CHECK_EQUAL(frame->header.plan, number);
      CHECK(std::ranges::equal(frame->body, body));
      pair.b.pop();
      CHECK_EQUAL(pair.a.unsent(), size_t{0});
    }
  }
}

TEST(a_link_that_lets_go_touches_no_memory_of_others) {
  Pair pair(11);
  Bytes body(3'200, 9), place(3'200, 0);
  const FrameHeader header{3'200, FrameKind::data, 1, 1};
  pair.b.place(header, place);
  pair.a.begin(header);
  pair.a.add_elsewhere(body);
  while (pair.a.unsent() > 2'000) pair.a.flush();
  REQUIRE(pair.a.unsent() > 0);
  for (int i = 0; i < 3; ++i) pair.b.receive();
  pair.a.drop_references();
  pair.b.drop_references();
  const Bytes before = place;
  std::ranges::fill(body, uint8_t{0});
  while (pair.a.unsent()) pair.a.flush();
  for (int i = 0; i < 50; ++i) pair.b.receive();
  CHECK(place == before);
  CHECK(!pair.ab.bytes.empty());  // the rest of the body, unchanged
  CHECK_EQUAL(std::count(pair.ab.bytes.begin(), pair.ab.bytes.end(), 9), std::ssize(pair.ab.bytes));
}

TEST(a_stream_over_several_sockets_keeps_its_order) {
  for (size_t sockets : {1, 2, 3, 5}) {
    std::vector<Descriptor> near, far;
    for (size_t i = 0; i < sockets; ++i) {
      int ends[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      near.emplace_back(ends[0]);
      far.emplace_back(ends[1]);
    }
    SocketPipe out(std::move(near), 0), in(std::move(far), 0);
    CHECK_EQUAL(in.descriptors().size(), sockets);
    std::mt19937 random(1);
    constexpr size_t total = 3 << 20;
    Bytes sent(total), got(total);
    for (uint8_t& byte : sent) byte = static_cast<uint8_t>(random());
    size_t written = 0, read = 0;
    while (read < total) {
      const size_t some = std::min<size_t>(total - written, random() % 200'000);
      const ptrdiff_t out_now = out.write(std::span(sent).subspan(written, some), random() % 2 != 0);
      REQUIRE(out_now >= 0);
      written += static_cast<size_t>(out_now);
      if (written == total) out.end_writing();
      const ptrdiff_t in_now =
          in.read(std::span(got).subspan(read, std::min<size_t>(total - read, random() % 200'000)));
      REQUIRE(in_now >= 0 || read == total);
      read += static_cast<size_t>(in_now);
    }
    CHECK(sent == got);
    CHECK_EQUAL(in.read(std::span(got).first(1)), -1);  // the end
    uint8_t more;
    CHECK_EQUAL(in.read({&more, 1}), -1);
  }
}

namespace {

// Links to ranks 1 and up, and the other ends of their sockets.
struct WatchedLinks {
  explicit WatchedLinks(int32_t peers) : links(peers + 1) {
    for (int32_t peer = 1; peer <= peers; ++peer) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) check::fail(__FILE__, __LINE__, "no sockets");
      std::vector<Descriptor> own;
      own.emplace_back(ends[0]);
      links.add_socket(peer, std::make_unique<SocketPipe>(std::move(own), 0));
      others.emplace_back(ends[1]);
    }
    if (!links.watch().is_ok()) check::fail(__FILE__, __LINE__, "the links are not watched");
  }
  void send(int32_t from, FrameHeader header) {
    const auto size = static_cast<ssize_t>(sizeof header);
    CHECK_EQUAL(::write(others[static_cast<size_t>(from) - 1].get(), &header, sizeof header), size);
  }
  std::vector<int32_t> look() {
    links.look();
    std::vector<int32_t> peers;
    for (const Links::PeerLink& entry : links.all())
      if (entry.link->may_receive()) peers.push_back(entry.peer);
    return peers;
  }

  Links links;
  std::vector<Descriptor> others;
};

}  // namespace

TEST(only_links_with_bytes_are_received_from) {
  WatchedLinks watched(5);
  using Peers = std::vector<int32_t>;
  CHECK(watched.look() == Peers{});
  watched.send(2, {.kind = FrameKind::goodbye});
  watched.send(4, {.kind = FrameKind::goodbye});
  CHECK(!watched.links.data(4)->receive());  // which nobody has noticed
  CHECK((watched.look() == Peers{2, 4}));
  CHECK((watched.look() == Peers{2, 4}));  // until the bytes are taken
  CHECK(watched.links.data(4)->receive());
  CHECK((watched.look() == Peers{2}));
  watched.others[0].close();  // the end of a stream is an arrival
  CHECK((watched.look() == Peers{1, 2}));
  CHECK(!watched.links.data(1)->receive());
  CHECK(watched.links.data(1)->is_ended());
}

TEST(a_few_links_are_received_from_without_a_question) {
  WatchedLinks watched(2);
  CHECK((watched.look() == std::vector<int32_t>{1, 2}));
}

TEST(a_machine_is_silent_only_while_it_owes_an_answer) {
  tcp_info info{};
  info.tcpi_last_ack_recv = info.tcpi_last_data_recv = 20'000;
  CHECK_EQUAL(silence_of(info), 0);  // idle
  for (auto owed : {&tcp_info::tcpi_retransmits, &tcp_info::tcpi_probes}) {
    tcp_info asked = info;
    asked.*owed = 1;
    CHECK_EQUAL(silence_of(asked), seconds(20));
    asked.tcpi_last_ack_recv = 30;  // its receive window is full, but it answers: its process is late
    CHECK_EQUAL(silence_of(asked), milliseconds(30));
  }
  info.tcpi_unacked = 3;
  CHECK_EQUAL(silence_of(info), seconds(20));
  info.tcpi_last_data_recv = 100;  // it sends data, without acknowledging what it received
  CHECK_EQUAL(silence_of(info), milliseconds(100));
}

// A connection of TCP within this machine, one end of which may lose all that arrives, as if it had been lost before.
struct DeafConnection {
  // Returns whether there is such a connection: emulators of a system may lack filters, or tell nothing of silence.
  bool open() {
    const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in place{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t length = sizeof place;
    auto* address = reinterpret_cast<sockaddr*>(&place);
    if (::bind(listener.get(), address, length) != 0 || ::listen(listener.get(), 1) != 0 ||
        ::getsockname(listener.get(), address, &length) != 0 || ::connect(here.get(), address, length) != 0)
      return false;
    there = Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    tcp_info info{};
    length = sizeof info;
    return ::getsockopt(here.get(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
           length > offsetof(tcp_info, tcpi_last_ack_recv) && set_deaf(true);
  }

  bool set_deaf(bool is_deaf) const {
    sock_filter take_nothing{BPF_RET | BPF_K, 0, 0, 0};
    const sock_fprog program{1, &take_nothing};
    const int option = is_deaf ? SO_ATTACH_FILTER : SO_DETACH_FILTER;
    return ::setsockopt(there.get(), SOL_SOCKET, option, &program, sizeof program) == 0;
  }

  Descriptor here{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)}, there;
};

// Repeats a step until a condition holds; returns whether it does before a long time has passed.
template <typename Condition, typename Step>
bool holds_after(Condition&& condition, Step&& step) {
  for (const Nanoseconds last = now() + seconds(60); !condition(); ::usleep(10'000)) {
    if (now() > last) return false;
    step();
  }
  return true;
}

TEST(a_machine_whose_answer_was_lost_is_asked_again_at_once) {
  DeafConnection connection;
  if (!connection.open()) return;
  const int socket = connection.here.get();
  REQUIRE(prepare_tcp(socket, seconds(1000)));
  const int never_again = 32'767, soon = 1;  // seconds until the next regular probe, and until the first one
  REQUIRE(::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &never_again, sizeof never_again) == 0);
  REQUIRE(::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &soon, sizeof soon) == 0);
  // The first probe has been lost: on a busy machine it arrives only some time after it was sent.
  REQUIRE(holds_after([&] { return tcp_silence(socket) >= milliseconds(1500); }, [] {}));
  REQUIRE(connection.set_deaf(false));
  ::usleep(500'000);
  CHECK(tcp_silence(socket) > 0);
  CHECK(holds_after([&] { return tcp_silence(socket) == 0; }, [&] { probe_tcp(socket); }));
}
