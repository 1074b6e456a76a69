// The path of links from the program, which makes connections, to the driver, which uses them. The program adds some
// links before the start, and others while the rank runs, when an operation has asked for them.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "transport/links/links.h"
#include "transport/sockets/socket_pipe.h"
#include "transport/sockets/tls_channel.h"

namespace sirtaki {

// The properties that links of a rank must have.
struct LinkRules {
  int32_t rank;
  const std::vector<int32_t>& host_of;  // by rank; may be filled in later
  bool encrypts;                        // links between hosts, if and only if this is set: there is no fallback
  size_t channels;                      // connections of a link between hosts
  Nanoseconds probes_after;
};

class LinkIntake {
 public:
  explicit LinkIntake(const LinkRules& rules) : rules_(rules) {}

  // Functions for the program, on any thread.

  // Add a connection to a peer, whose descriptor and session they own on success. After the start, a link is complete
  // once all its connections are there; `is_complete` returns whether it is, and the driver should be woken.
  Status add_socket(int32_t peer, int fd, bool& is_complete);
  Status add_tls(int32_t peer, int fd, std::unique_ptr<TlsSession>& session, bool& is_complete);
  // Lets operations ask for links after the start.
  void allow_requests() { allows_requests_ = true; }
  // Waits until links are asked for, and takes the peers of the first `most` of them. SRT_IN_PROGRESS: there were none
  // in this time; SRT_SHUT_DOWN: none will be asked for any more.
  Status wait_for_requests(size_t most, Nanoseconds timeout, std::vector<int32_t>& out);
  // Reports that a link that was asked for cannot be made.
  void fail(int32_t peer, std::string text);

  // Functions for the driver.

  // Adds the links of which a connection is there. From now on only complete ones are added.
  void start(Links& links);
  void ask(const std::vector<int32_t>& peers);
  bool has_news() const { return has_news_.load(std::memory_order_seq_cst); }

  struct News {
    struct Made {
      int32_t peer;
      std::unique_ptr<BytePipe> pipe;
    };
    std::vector<Made> made;
    std::optional<std::pair<int32_t, std::string>> failed;  // the first peer to which no link can be made, and why
  };
  News take();

  // Ends the intake: this rank needs no further link. Callable more than once.
  void close();
  void forked() NOT_ANALYZED;  // in a forked child; takes no lock

 private:
  struct Parts {
    std::vector<Descriptor> sockets;
    std::vector<TlsChannel> channels;
  };

  bool crosses(int32_t peer) const;
  Status check(int32_t peer, int fd, bool is_encrypted) const REQUIRES(mutex_);
  bool complete(int32_t peer) REQUIRES(mutex_);
  std::unique_ptr<BytePipe> make_pipe(Parts parts) const;

  const LinkRules rules_;
  std::atomic<bool> allows_requests_{false}, has_news_{false}, is_closed_{false};
  Mutex mutex_;
  std::condition_variable changed_;
  std::map<int32_t, Parts> parts_ GUARDED_BY(mutex_);  // by peer: links of which connections may be missing
  std::set<int32_t> linked_ GUARDED_BY(mutex_);
  std::vector<int32_t> requests_ GUARDED_BY(mutex_);
  News news_ GUARDED_BY(mutex_);
  bool is_started_ GUARDED_BY(mutex_) = false;
};

}  // namespace sirtaki
