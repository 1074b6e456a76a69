// Links over MPI by themselves, without the ranks around them.
#include "transport/links/mpi_pipe.h"

#include <random>

#include "fake_mpi.h"
#include "random_bytes.h"

using namespace world;

namespace {

// A socket on which nothing arrives.
struct Silent final : BytePipe {
  ptrdiff_t write(std::span<const uint8_t> bytes, bool) override { return static_cast<ptrdiff_t>(bytes.size()); }
  ptrdiff_t read(std::span<uint8_t>) override { return 0; }
};

}  // namespace

TEST(frames_of_all_sizes_pass_in_order) {
  for (const FakeMpi::Manner& manner : {prompt, slow}) {
    FakeMpi mpi(2, manner);
    Link from(std::make_unique<MpiPipe>(mpi.of(0), 1)), to(std::make_unique<MpiPipe>(mpi.of(1), 0));
    const std::vector<size_t> sizes{0, 1, 16, 5'000, MpiPipe::piece_bytes - 16, MpiPipe::piece_bytes, 3'000'001};
    std::vector<std::vector<uint8_t>> bodies;
    for (size_t size : sizes) {
      bodies.push_back(random_bytes(size));
      from.begin({static_cast<uint32_t>(size), FrameKind::data, 0, size});
      if (size) from.add_elsewhere(bodies.back());
    }
    for (const std::vector<uint8_t>& body : bodies) {
      const Frame* frame = nullptr;
      while (to.front(frame).is_ok() && !frame) {
        from.progress();
        from.flush();
        to.receive();
      }
      CHECK_EQUAL(frame->header.plan, body.size());
      CHECK(std::ranges::equal(frame->body, body));
      to.pop();
    }
    while (!from.is_delivered()) from.progress();
  }
}

TEST(a_header_and_its_body_are_one_message) {
  FakeMpi mpi(2);
  Link from(std::make_unique<MpiPipe>(mpi.of(0), 1));
  const std::vector<uint8_t> body(20'000);
  for (int i = 0; i < 2; ++i) {
    from.begin({static_cast<uint32_t>(body.size()), FrameKind::data, 0, 1});
    from.add_elsewhere(body);
    from.add(0);
  }
  from.flush();
  CHECK_EQUAL(from.unsent(), size_t{0});
  CHECK_EQUAL(mpi.sent(), 1);
}

TEST(bytes_wait_while_as_many_messages_as_may_be_are_in_flight) {
  FakeMpi mpi(2);
  MpiPipe from(mpi.of(0), 1), to(mpi.of(1), 0);
  const std::vector<uint8_t> bytes = random_bytes((MpiPipe::pieces + 1) * MpiPipe::piece_bytes);
  const auto capacity = static_cast<ptrdiff_t>(MpiPipe::pieces * MpiPipe::piece_bytes);
  CHECK_EQUAL(from.write(bytes, false), capacity);
  CHECK_EQUAL(from.write(bytes, false), 0);
  CHECK(!from.is_delivered());
  std::vector<uint8_t> received(bytes.size());
  CHECK_EQUAL(to.read(received), capacity);
  CHECK(!from.is_delivered());
  from.progress();
  CHECK(from.is_delivered());
  CHECK_EQUAL(from.write({bytes.data() + capacity, MpiPipe::piece_bytes}, false), ptrdiff_t{MpiPipe::piece_bytes});
}

TEST(an_error_of_mpi_ends_the_pipe_behind_what_has_arrived) {
  FakeMpi mpi(2);
  MpiPipe from(mpi.of(0), 1), to(mpi.of(1), 0);
  const std::vector<uint8_t> bytes = random_bytes(100);
  std::vector<uint8_t> received(60);
  CHECK_EQUAL(from.write(bytes, false), 100);
  CHECK_EQUAL(to.read(received), 60);
  mpi.fail(1);
  CHECK_EQUAL(to.read(received), 40);
  CHECK_EQUAL(to.read(received), -1);
  CHECK_EQUAL(to.write(bytes, false), -1);
}

TEST(a_message_that_no_rank_sends_ends_the_pipe) {
  for (const int bytes : {0, static_cast<int>(MpiPipe::piece_bytes) + 1}) {
    FakeMpi mpi(2);
    const srt_mpi sender = mpi.of(0);
    const auto message = std::make_unique<uint8_t[]>(MpiPipe::piece_bytes + 1);
    uint64_t request = 0;
    MpiPipe to(mpi.of(1), 0);
    std::vector<uint8_t> received(60);
    CHECK_EQUAL(sender.issend(message.get(), bytes, sender.byte_type, 1, sender.tag, sender.comm, &request), 0);
    CHECK_EQUAL(to.read(received), -1);
    mpi.forget();
  }
}

TEST(a_message_of_another_world_is_not_received) {
  FakeMpi mpi(2);
  MpiPipe before(mpi.of(0, 1), 1), from(mpi.of(0, 2), 1), to(mpi.of(1, 2), 0);
  const std::vector<uint8_t> old(10, 1), bytes(10, 2);
  std::vector<uint8_t> received(20);
  CHECK_EQUAL(before.write(old, false), 10);
  CHECK_EQUAL(from.write(bytes, false), 10);
  CHECK_EQUAL(to.read(received), 10);
  CHECK_EQUAL(received[0], 2);
}

TEST(an_idle_rank_does_not_look) {
  FakeMpi mpi(2);
  Links links(2);
  const std::vector<int32_t> peers{1};
  links.use_mpi(mpi.of(0), peers);
  CHECK(!links.obtain(1));  // there is no socket for the goodbye yet
  CHECK_EQUAL(links.take_requests().size(), size_t{1});
  CHECK(links.awaits(1));
  links.add_socket(1, std::make_unique<Silent>());
  Link& link = *links.obtain(1);
  CHECK(!links.awaits(1));
  CHECK(links.must_poll(true));
  CHECK(!links.must_poll(false));
  link.send({.kind = FrameKind::data}, {});
  CHECK(links.must_poll(false));
  link.flush();
  CHECK(links.must_poll(false));
  MpiPipe peer(mpi.of(1), 0);
  std::vector<uint8_t> received(100);
  CHECK_EQUAL(peer.read(received), 16);
  links.look();
  CHECK(!links.must_poll(false));
  CHECK(!links.has_requests());
  link.send({.kind = FrameKind::data}, {});
  links.note_last_frame(1, 0);  // the peer takes no further frame
  CHECK(!link.flush());
  CHECK(!links.must_poll(false));
  CHECK_EQUAL(link.unsent(), size_t{0});
}
