#include "transport/links.h"

#include <algorithm>

namespace sirtaki {

Status Links::watch() {
  const auto sockets = std::ranges::count_if(all_, [](const PeerLink& entry) { return !entry.is_ring; });
  if (static_cast<size_t>(sockets) <= few_sockets) return Status::ok();
  if (!watch_.is_open()) SIRTAKI_TRY(watch_.open());
  for (; watched_ < all_.size(); ++watched_)
    for (int socket : all_[watched_].link->descriptors()) SIRTAKI_TRY(watch_.add(socket, watched_));
  return Status::ok();
}

void Links::look() {
  if (!watch_.is_open()) return;
  for (PeerLink& entry : all_) entry.has_inbound = entry.is_ring || entry.link->holds_inbound();
  for (size_t index : watch_.look()) all_[index].has_inbound = true;
}

}  // namespace sirtaki
