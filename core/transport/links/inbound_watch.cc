#include "transport/links/inbound_watch.h"

#include <sys/epoll.h>

namespace sirtaki {

InboundWatch::InboundWatch() = default;
InboundWatch::~InboundWatch() = default;

Status InboundWatch::open() {
  epoll_ = Descriptor(::epoll_create1(EPOLL_CLOEXEC));
  return epoll_.is_open() ? Status::ok() : system_call_failed("epoll_create1");
}

void InboundWatch::close() { epoll_.close(); }

// Watches by level, not by edge: a link may leave bytes in its socket, because a frame that waits here throttles the
// peer.
Status InboundWatch::add(int socket, size_t link) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = link;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) != 0) return system_call_failed("epoll_ctl");
  events_.emplace_back();
  found_.reserve(events_.size());
  return Status::ok();
}

std::span<const size_t> InboundWatch::look() {
  found_.clear();
  const int count = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), 0);
  for (int i = 0; i < count; ++i) found_.push_back(static_cast<size_t>(events_[static_cast<size_t>(i)].data.u64));
  return found_;
}

}  // namespace sirtaki
