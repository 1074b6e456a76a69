#include "transport/links/links.h"

#include <algorithm>

namespace sirtaki {

Status Links::watch() {
  const auto sockets =
      std::ranges::count_if(all_, [](const PeerLink& entry) { return !entry.link->descriptors().empty(); });
  if (static_cast<size_t>(sockets) <= few_sockets) return Status::ok();
  if (!watch_.is_open()) SIRTAKI_TRY(watch_.open());
  for (; watched_ < all_.size(); ++watched_)
    for (int socket : all_[watched_].link->descriptors()) SIRTAKI_TRY(watch_.add(socket, watched_));
  return Status::ok();
}

Link* Links::obtain(int32_t peer) {
  const auto index = static_cast<size_t>(peer);
  if (data_[index]) return data_[index];
  if (over_mpi_[index] && control_[index]) {
    data_[index] = add(peer, false, std::make_unique<MpiPipe>(mpi_, peer));
    if (last_frames_[index] != no_frame) data_[index]->stop_sending();
    return data_[index];
  }
  if (!requested_[index]) requests_.push_back(peer);
  requested_[index] = true;
  return nullptr;
}

void Links::look() {
  for (Link* link : polled_) link->progress();
  if (!watch_.is_open()) return;
  for (const PeerLink& entry : all_)
    entry.link->note_inbound(entry.is_ring || entry.link->is_polled() || entry.link->holds_inbound());
  for (size_t index : watch_.look()) all_[index].link->note_inbound(true);
}

}  // namespace sirtaki
