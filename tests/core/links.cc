// Framing over a pipe that moves a few bytes at a time, and what a link does with bytes that make no sense.
#include <algorithm>
#include <deque>
#include <random>

#include "base/codec.h"
#include "check.h"
#include "transport/link.h"

using namespace sirtaki;

namespace {

// Two ends in one process; each call moves as many bytes as a seeded generator likes.
struct Channel {
  std::deque<uint8_t> bytes;
  bool ended = false;
};

class DrippingPipe final : public BytePipe {
 public:
  DrippingPipe(Channel& out, Channel& in, unsigned seed) : out_(out), in_(in), random_(seed) {}
  ptrdiff_t write(std::span<const uint8_t> bytes) override {
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

CHECK_MAIN()
