// The signals that the engine's sleep receives from descriptors. They are edge-triggered: each event is reported once,
// so none may be lost between reading the links and falling asleep.
#include "context/state/event_waiter.h"

#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "transport/sockets/socket_pipe.h"

using namespace sirtaki;

namespace {

struct Ends {
  Ends() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    far = ends[1];
    std::vector<Descriptor> sockets;
    sockets.push_back(Descriptor(ends[0]));
    links.add_socket(1, std::make_unique<SocketPipe>(std::move(sockets), 0));
  }
  ~Ends() { ::close(far); }
  void write() { CHECK_EQUAL(::write(far, "x", 1), 1); }

  Links links{2};
  int far = -1;
};

}  // namespace

TEST(what_arrives_after_the_links_were_read_is_told) {
  Ends ends;
  EventWaiter waiter(nullptr, ends.links);
  REQUIRE(waiter.open().is_ok());
  CHECK(waiter.take_events().of_links);   // there is room to write
  CHECK(!waiter.take_events().of_links);  // which is reported once
  while (ends.links.data(1)->receive()) {
  }
  ends.write();  // too late for this reading, so the look must report that another one is needed
  const EventWaiter::WakeEvents events = waiter.take_events();
  CHECK(events.of_links && events.deaths.empty());
  CHECK(ends.links.data(1)->receive());
  CHECK(!waiter.take_events().of_links);
}

TEST(a_sleep_ends_when_a_link_has_news_that_nobody_has_looked_at) {
  Ends ends;
  EventWaiter waiter(nullptr, ends.links);
  REQUIRE(waiter.open().is_ok());
  waiter.take_events();
  ends.write();
  const Nanoseconds begun = now();
  waiter.waiter_sleep(now() + seconds(60));
  CHECK(now() - begun < seconds(50));
  CHECK(waiter.take_events().of_links);
}

TEST(the_timer_ends_a_sleep_at_the_first_of_the_moments_that_were_asked_for) {
  Ends ends;
  EventWaiter waiter(nullptr, ends.links);
  REQUIRE(waiter.open().is_ok());
  for (const auto& [first, second] :
       {std::pair(seconds(60), milliseconds(1)), std::pair(milliseconds(1), seconds(60))}) {
    waiter.take_events();  // of the links, and of the timer's last expiry
    const Nanoseconds begun = now();
    waiter.set_timer(first);
    waiter.set_timer(second);
    waiter.waiter_sleep(now() + seconds(50));
    CHECK(now() - begun >= milliseconds(1) && now() - begun < seconds(40));
    waiter.waiter_sleep(now() + seconds(50));  // the expiry ends each sleep until its event is taken
    CHECK(now() - begun < seconds(40));
  }
}
