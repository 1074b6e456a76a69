// Encrypted connections: what they deliver, what they reject, and how they end.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "encrypted.h"
#include "random_bytes.h"

using namespace sirtaki;
using encrypted::Ends;
using encrypted::Sessions;
using Bytes = std::vector<uint8_t>;

namespace {

struct Sockets {
  Sockets() {
    int made[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, made) != 0) check::fail(__FILE__, __LINE__, "no sockets");
    for (int end : {0, 1}) ends[end] = Descriptor(made[end]);
  }
  Ends on(uint64_t key_lasts = TlsSession::bytes_per_key) const { return {{ends[0].get(), ends[1].get()}, key_lasts}; }

  Descriptor ends[2];
};

// Makes the send buffer so small that a record does not fit, and that the sender has to wait in the middle of one.
void make_small(int socket) {
  const int bytes = 4096;
  ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

// Reads from an end until no more bytes arrive; `has_ended` tells whether that is the end of the stream.
Bytes read_all(TlsSession& from, bool& has_ended) {
  Bytes all, part(5000);
  for (;;) {
    const ptrdiff_t count = from.read(part);
    has_ended = count < 0;
    if (count <= 0) return all;
    all.insert(all.end(), part.begin(), part.begin() + count);
  }
}

}  // namespace

TEST(a_stream_over_encrypted_connections_keeps_its_order_while_keys_change) {
  for (size_t count : {1, 2, 3}) {
    std::vector<TlsChannel> near, far;
    for (size_t i = 0; i < count; ++i) {
      Sockets sockets;
      Sessions sessions = encrypted::establish(sockets.on(100'000));
      make_small(sockets.ends[0].get());
      near.emplace_back(std::move(sockets.ends[0]), std::move(sessions.ends[0]));
      far.emplace_back(std::move(sockets.ends[1]), std::move(sessions.ends[1]));
    }
    TlsPipe out(std::move(near), 0), in(std::move(far), 0);
    CHECK_EQUAL(in.descriptors().size(), count);
    std::mt19937 random(1);
    const Bytes sent = random_bytes(3 << 20);
    Bytes got(sent.size());
    size_t written = 0, shown = 0, read = 0;
    while (read < sent.size()) {
      shown = std::max(shown, std::min<size_t>(sent.size(), written + random() % 200'000));
      const ptrdiff_t out_now = out.write(std::span(sent).subspan(written, shown - written), random() % 2 != 0);
      REQUIRE(out_now >= 0);
      written += static_cast<size_t>(out_now);
      const ptrdiff_t in_now =
          in.read(std::span(got).subspan(read, std::min<size_t>(sent.size() - read, random() % 200'000)));
      REQUIRE(in_now >= 0);
      read += static_cast<size_t>(in_now);
    }
    CHECK(sent == got);
    out.end_writing();
    uint8_t more;
    CHECK_EQUAL(in.read({&more, 1}), -1);
  }
}

TEST(bytes_that_the_socket_no_longer_shows_are_known) {
  Sockets sockets;
  Sessions sessions = encrypted::establish(sockets.on());
  const Bytes text = random_bytes(1000);
  CHECK_EQUAL(sessions.ends[0]->write(text, false), static_cast<ptrdiff_t>(text.size()));
  std::vector<TlsChannel> far;
  const int socket = sockets.ends[1].get();
  far.emplace_back(std::move(sockets.ends[1]), std::move(sessions.ends[1]));
  TlsPipe pipe(std::move(far), 0);
  CHECK(!pipe.holds_inbound());
  Bytes got(text.size());
  CHECK_EQUAL(pipe.read(std::span(got).first(10)), 10);
  uint8_t peeked;
  CHECK_EQUAL(::recv(socket, &peeked, 1, MSG_PEEK | MSG_DONTWAIT), -1);
  CHECK(pipe.holds_inbound());
  CHECK_EQUAL(pipe.read(std::span(got).subspan(10)), 990);
  CHECK(got == text);
  CHECK(!pipe.holds_inbound());
}

TEST(an_end_that_nobody_has_read_is_known) {
  Sockets sockets;
  Sessions sessions = encrypted::establish(sockets.on());
  const Bytes text = random_bytes(1000);
  CHECK_EQUAL(sessions.ends[0]->write(text, false), static_cast<ptrdiff_t>(text.size()));
  const Bytes no_record(5);  // as many bytes as the header of a record has
  REQUIRE(::send(sockets.ends[0].get(), no_record.data(), no_record.size(), MSG_NOSIGNAL) == 5);
  Bytes got(text.size() + 1);
  CHECK_EQUAL(sessions.ends[1]->read(got), static_cast<ptrdiff_t>(text.size()));
  CHECK(sessions.ends[1]->holds_inbound());
  CHECK_EQUAL(sessions.ends[1]->read(got), -1);
}

TEST(nothing_of_the_text_is_on_the_wire) {
  const Bytes text = random_bytes(1000);
  Sockets sockets;
  Sessions sessions = encrypted::establish(sockets.on());
  CHECK_EQUAL(sessions.ends[0]->write(text, false), static_cast<ptrdiff_t>(text.size()));
  Bytes wire(4000);
  const ssize_t count = ::recv(sockets.ends[1].get(), wire.data(), wire.size(), MSG_PEEK);
  REQUIRE(count > static_cast<ssize_t>(text.size()));
  CHECK(std::search(wire.begin(), wire.end(), text.begin(), text.begin() + 16) == wire.end());
  bool has_ended = true;
  CHECK(read_all(*sessions.ends[1], has_ended) == text);
  CHECK(!has_ended);
}

TEST(a_handshake_takes_nothing_that_follows_it) {
  Sockets sockets;
  Sessions sessions = encrypted::begin(sockets.on());
  Status connecting;
  while (!(connecting = sessions.ends[0]->handshake()).is_ok()) {
    REQUIRE(connecting.code() == SRT_IN_PROGRESS);
    CHECK_EQUAL(sessions.ends[1]->handshake().code(), SRT_IN_PROGRESS);
  }
  const Bytes text = random_bytes(100);
  CHECK_EQUAL(sessions.ends[0]->write(text, false), 100);
  expect_ok(sessions.ends[1]->handshake());
  CHECK_EQUAL(sessions.ends[1]->unread(), size_t{0});  // so polling the socket reports it
  bool has_ended = true;
  CHECK(read_all(*sessions.ends[1], has_ended) == text);
}

TEST(another_certificate_than_was_announced_is_refused) {
  const auto first = encrypted::identity(), second = encrypted::identity(), stranger = encrypted::identity();
  for (int deceived : {0, 1}) {
    Sockets sockets;
    Sessions sessions;
    const Fingerprint& of_second = (deceived == 0 ? stranger : second)->fingerprint();
    const Fingerprint& of_first = (deceived == 1 ? stranger : first)->fingerprint();
    expect_ok(TlsSession::open(first, sockets.ends[0].get(), TlsRole::connects, of_second, sessions.ends[0]));
    expect_ok(TlsSession::open(second, sockets.ends[1].get(), TlsRole::accepts, of_first, sessions.ends[1]));
    Status results[2];
    encrypted::shake_hands(sessions, results);
    CHECK_EQUAL(results[deceived].code(), SRT_PROTOCOL);
    const std::string words = results[deceived].text();
    CHECK(words.find("the other side does not have the certificate that it proved to have") == 0);
  }
}

TEST(a_stream_that_is_cut_or_changed_ends) {
  enum class Fault { none, cut, changed };
  for (const Fault fault : {Fault::none, Fault::cut, Fault::changed}) {
    Sockets sockets;
    Sessions sessions = encrypted::establish(sockets.on());
    const Bytes text = random_bytes(10'000);
    CHECK_EQUAL(sessions.ends[0]->write(text, false), static_cast<ptrdiff_t>(text.size()));
    Bytes wire(20'000);
    const ssize_t count = ::recv(sockets.ends[1].get(), wire.data(), wire.size(), 0);
    REQUIRE(count > 10'000);
    if (fault == Fault::changed) wire[100] ^= 1;
    const auto passed = static_cast<size_t>(fault == Fault::cut ? count - 1 : count);
    // Sends again, from the same side, the bytes that were taken off the wire.
    REQUIRE(::send(sockets.ends[0].get(), wire.data(), passed, MSG_NOSIGNAL) == static_cast<ssize_t>(passed));
    if (fault == Fault::none) sessions.ends[0]->end_writing();
    if (fault == Fault::cut) sockets.ends[0].close();
    bool has_ended = false;
    const Bytes got = read_all(*sessions.ends[1], has_ended);
    CHECK(has_ended);
    CHECK(got == (fault == Fault::none ? text : Bytes()));
  }
}

TEST(last_words_are_read_though_nothing_can_be_written_any_more) {
  Sockets sockets;
  Sessions sessions = encrypted::establish(sockets.on());
  const Bytes words = random_bytes(100), text = random_bytes(100'000);
  CHECK_EQUAL(sessions.ends[1]->write(words, false), 100);
  sockets.ends[1].close();
  ptrdiff_t written = 0;
  for (int i = 0; i < 10 && written >= 0; ++i) written = sessions.ends[0]->write(text, false);
  CHECK_EQUAL(written, -1);  // and no signal is raised
  bool has_ended = false;
  CHECK(read_all(*sessions.ends[0], has_ended) == words);
  CHECK(has_ended);
}

TEST(without_openssl_there_is_a_sentence_that_says_what_to_install) {
  std::shared_ptr<const TlsIdentity> none;
  const Status status = TlsIdentity::create("libssl-of-nobody.so", none);
  CHECK_EQUAL(status.code(), SRT_UNSUPPORTED);
  const std::string words = status.text();
  CHECK(words.find("libssl-of-nobody.so was not found") == 0);
  CHECK(contains(words, "apt install libssl3"));
  CHECK(contains(TlsIdentity::create("libm.so.6", none), "cannot be used: it has no TLS_method"));
}
