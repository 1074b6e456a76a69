// The signals that the engine's sleep receives from descriptors. They are edge-triggered: each event is reported once,
// so none may be lost between reading the links and falling asleep.
#include "context/sleeper.h"

#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "transport/socket_pipe.h"

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
  Sleeper sleeper(nullptr, ends.links);
  REQUIRE(sleeper.open().is_ok());
  CHECK(sleeper.look().of_links);   // there is room to write
  CHECK(!sleeper.look().of_links);  // which is reported once
  while (ends.links.data(1)->receive()) {
  }
  ends.write();  // too late for this reading, so the look must report that another one is needed
  const Sleeper::Signs signs = sleeper.look();
  CHECK(signs.of_links && signs.deaths.empty());
  CHECK(ends.links.data(1)->receive());
  CHECK(!sleeper.look().of_links);
}

TEST(a_sleep_ends_when_a_link_has_news_that_nobody_has_looked_at) {
  Ends ends;
  Sleeper sleeper(nullptr, ends.links);
  REQUIRE(sleeper.open().is_ok());
  sleeper.look();
  ends.write();
  const Nanoseconds begun = now();
  sleeper.waiter_sleep(now() + seconds(60));
  CHECK(now() - begun < seconds(50));
  CHECK(sleeper.look().of_links);
}

CHECK_MAIN()
