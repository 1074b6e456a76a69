// This rank's links. Data uses sockets: to ranks of other hosts, and within a host if there is no shared memory.
// Control frames between the first rank of a host and its other ranks use rings in shared memory, if there is any;
// two such ranks of a job on several hosts may therefore have two links. There need not be a link to each peer: an
// operation requests those that it needs. Where MPI moves the data between hosts, sockets carry control frames only,
// and a link over MPI opens when the first operation needs it and there is a socket, too: for the peer's goodbye.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "transport/links/inbound_watch.h"
#include "transport/links/link.h"
#include "transport/links/mpi_pipe.h"

namespace sirtaki {

class Links {
 public:
  struct PeerLink {
    int32_t peer;
    bool is_ring;  // in shared memory: doorbells announce its frames
    std::unique_ptr<Link> link;
  };

  explicit Links(int32_t size)
      : data_(static_cast<size_t>(size)), control_(static_cast<size_t>(size)), requested_(static_cast<size_t>(size)),
        over_mpi_(static_cast<size_t>(size)) {}

  void add_ring(int32_t peer, std::unique_ptr<BytePipe> pipe) {
    control_[static_cast<size_t>(peer)] = add(peer, true, std::move(pipe));
  }
  void add_socket(int32_t peer, std::unique_ptr<BytePipe> pipe) {
    Link*& control = control_[static_cast<size_t>(peer)];
    Link* added = add(peer, false, std::move(pipe));
    if (!is_over_mpi(peer)) data_[static_cast<size_t>(peer)] = added;
    if (!control) control = added;
  }
  // Has MPI move the data to and from these peers.
  void use_mpi(const srt_mpi& mpi, std::span<const int32_t> peers) {
    mpi_ = mpi;
    last_frames_.assign(data_.size(), no_frame);
    for (int32_t peer : peers) over_mpi_[static_cast<size_t>(peer)] = true;
  }
  // Prepares look() for the links that were added since the last call. A few sockets are not watched: to receive from
  // each costs no more than to ask for those that have bytes.
  Status watch();
  // Notes which links have bytes to receive; until the next call, the others do not ask their sockets.
  void look();

  // Lets operations request links to any peer; whoever takes the requests has to add the links.
  void allow_requests() { allows_requests_ = true; }
  bool can_reach(int32_t peer) const { return allows_requests_ || data(peer) || (is_over_mpi(peer) && control(peer)); }
  // Returns the link for the data of an operation; nullptr: it is requested, and not there yet.
  Link* obtain(int32_t peer);
  // Returns whether a link to a peer is requested, and not there yet.
  bool awaits(int32_t peer) const { return requested_[static_cast<size_t>(peer)] && !data(peer); }

  bool is_over_mpi(int32_t peer) const { return over_mpi_[static_cast<size_t>(peer)]; }
  // Return how many frames this rank has sent to a peer over MPI, as far as the peer has received all of them; whether
  // the peer's own have been taken, of which there are as many as note_last_frame() says.
  uint64_t frames_over_mpi(int32_t peer) const {
    return data(peer) && data(peer)->is_delivered() ? data(peer)->frames_queued() : 0;
  }
  // After it, the peer receives nothing.
  void note_last_frame(int32_t peer, uint64_t count) {
    last_frames_[static_cast<size_t>(peer)] = count;
    if (Link* link = data(peer)) link->stop_sending();
  }
  bool has_all_frames(int32_t peer) const {
    return !is_over_mpi(peer) ||
           (data(peer) ? data(peer)->frames_taken() : 0) >= last_frames_[static_cast<size_t>(peer)];
  }
  bool has_requests() const { return !requests_.empty(); }
  std::vector<int32_t> take_requests() { return std::exchange(requests_, {}); }

  // Counts what links that are added from now on send; `sent` must outlive them.
  void count_in(SentBytes& sent) { sent_ = &sent; }

  // Ends writing after the last frames; peers then read end-of-stream.
  void end_writing() {
    for (const PeerLink& entry : all_) entry.link->end_writing();
  }
  bool are_delivered() const {
    for (const PeerLink& entry : all_)
      if (!entry.is_ring && !entry.link->is_polled() && !entry.link->is_delivered()) return false;
    return true;
  }
  void close() {
    watch_.close();
    watched_ = 0;
    all_.clear();
    polled_.clear();
    data_.assign(data_.size(), nullptr);
    control_.assign(control_.size(), nullptr);
  }

  // Return a link to a peer; nullptr if there is none. Both return the same link if there is only one.
  Link* data(int32_t peer) const { return data_[static_cast<size_t>(peer)]; }
  Link* control(int32_t peer) const { return control_[static_cast<size_t>(peer)]; }

  const std::vector<PeerLink>& all() const { return all_; }

  // Return whether rings have frames to be read, or links have bytes that no peer has taken yet.
  bool has_inbound() const {
    for (const PeerLink& entry : all_)
      if (entry.link->readable()) return true;
    return false;
  }
  bool has_outbound() const { return has_unsent(true) || has_unsent(false); }
  // Links that do not wake this rank: returns whether it has to look at them, because bytes are in flight, or an
  // operation may wait; stops their use.
  bool must_poll(bool is_in_operation) const {
    for (const Link* link : polled_)
      if (is_in_operation || !link->is_delivered()) return true;
    return false;
  }
  void give_up_polled() {
    for (Link* link : polled_) link->give_up();
  }
  bool rings_have_outbound() const { return has_unsent(true); }

 private:
  Link* add(int32_t peer, bool is_ring, std::unique_ptr<BytePipe> pipe) {
    SentCounter* sent = sent_ ? &sent_->of(peer, pipe->transport()) : nullptr;
    const bool is_polled = pipe->is_polled();
    all_.push_back({peer, is_ring, std::make_unique<Link>(std::move(pipe), sent)});
    Link* added = all_.back().link.get();
    if (is_polled) polled_.push_back(added);
    return added;
  }
  bool has_unsent(bool of_rings) const {
    for (const PeerLink& entry : all_)
      if (entry.is_ring == of_rings && entry.link->unsent()) return true;
    return false;
  }

  static constexpr size_t few_sockets = 2;
  static constexpr uint64_t no_frame = ~uint64_t{0};  // the peer has not said which is its last

  SentBytes* sent_ = nullptr;
  bool allows_requests_ = false;
  InboundWatch watch_;
  size_t watched_ = 0;  // number of links that look() serves, once the watch is open
  std::vector<PeerLink> all_;
  std::vector<Link*> polled_;  // of these
  std::vector<Link*> data_, control_;  // by peer
  std::vector<bool> requested_;        // likewise
  std::vector<int32_t> requests_;      // that nobody has taken yet
  std::vector<bool> over_mpi_;         // by peer
  std::vector<uint64_t> last_frames_;  // by peer, if MPI moves any data
  srt_mpi mpi_{};
};

}  // namespace sirtaki
