#include "context/state/event_waiter.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>

namespace sirtaki {
namespace {

// The source of an event in `sources_`: a kind in the upper half, a slot or rank in the lower.
enum Tag : uint64_t { tag_timer = uint64_t{1} << 32, tag_local_peer = uint64_t{2} << 32, tag_link = uint64_t{3} << 32 };

bool add(int epoll, int fd, uint32_t events, uint64_t tag) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

void drain(int bell) {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = ::read(bell, &count, sizeof count);
}

void ring(int bell) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(bell, &one, sizeof one);
}

}  // namespace

Status EventWaiter::open() {
  sources_ = Descriptor(::epoll_create1(EPOLL_CLOEXEC));
  engine_ = Descriptor(::epoll_create1(EPOLL_CLOEXEC));
  timer_ = Descriptor(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  engine_bell_ = local_peers_ ? Descriptor::duplicate(local_peers_->own_engine_doorbell())
                              : Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  waiter_bell_ = local_peers_ ? Descriptor::duplicate(local_peers_->own_waiter_doorbell())
                              : Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (const Descriptor* one : {&sources_, &engine_, &timer_, &engine_bell_, &waiter_bell_})
    if (!one->is_open()) return system_call_failed("opening the engine's descriptors");
  const bool added = add(engine_.get(), engine_bell_.get(), EPOLLIN, 0) &&
                     add(engine_.get(), sources_.get(), EPOLLIN | EPOLLONESHOT, 1);
  if (!added) return system_call_failed("epoll_ctl");
  SIRTAKI_TRY(watch(timer_.get(), EPOLLIN, tag_timer));
  SIRTAKI_TRY(watch_links());
  for (int slot = 0; local_peers_ && slot < local_peers_->slot_count(); ++slot)
    for (int fd : {local_peers_->process_descriptor(slot), local_peers_->socket_descriptor(slot)})
      if (fd >= 0) SIRTAKI_TRY(watch(fd, EPOLLIN | EPOLLRDHUP, tag_local_peer | static_cast<uint32_t>(slot)));
  return Status::ok();
}

Status EventWaiter::watch_links() {
  constexpr uint32_t events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  for (; watched_links_ < links_.all().size(); ++watched_links_) {
    const Links::PeerLink& entry = links_.all()[watched_links_];
    for (int fd : entry.link->descriptors())
      SIRTAKI_TRY(watch(fd, events, tag_link | static_cast<uint32_t>(entry.peer)));
  }
  return Status::ok();
}

// Watches a descriptor. Links are edge-triggered, because an iteration may leave bytes of later plans unread.
Status EventWaiter::watch(int fd, uint32_t events, uint64_t tag) {
  return add(sources_.get(), fd, events, tag) ? Status::ok() : system_call_failed("epoll_ctl");
}

void EventWaiter::close() {
  for (Descriptor* one : {&sources_, &engine_, &timer_, &engine_bell_, &waiter_bell_}) one->close();
}

void EventWaiter::set_attention(Attention attention) {
  if (local_peers_) local_peers_->set_attention(attention);
  else own_attention_.store(static_cast<uint32_t>(attention), std::memory_order_seq_cst);
}

Attention EventWaiter::attention() const {
  return local_peers_ ? local_peers_->attention_of(local_peers_->own_slot())
                      : static_cast<Attention>(own_attention_.load(std::memory_order_seq_cst));
}

// Blocks until an event or `until`. ppoll serves waits below 1 ms, because epoll_wait counts in milliseconds.
void EventWaiter::engine_sleep(Nanoseconds until) {
  int timeout = -1;
  if (until != never) {
    const Nanoseconds left = std::max<Nanoseconds>(until - now(), 0);
    timeout = static_cast<int>(std::min<Nanoseconds>((left + milliseconds(1) - 1) / milliseconds(1), 60'000));
    if (left < milliseconds(1)) {
      const timespec precisely{0, left};
      pollfd one{engine_.get(), POLLIN, 0};
      ::ppoll(&one, 1, &precisely, nullptr);
      timeout = 0;
    }
  }
  epoll_event events[2];
  const int count = ::epoll_wait(engine_.get(), events, 2, timeout);
  for (int i = 0; i < count; ++i)
    if (events[i].data.u64 == 0) drain(engine_bell_.get());
}

// Polls `sources_` itself. Another epoll set around it would halve the number of ranks of a host: all of them watch the
// same file of a process, and the kernel refuses a file that more than 500 sets watch through another set (path_limits
// in fs/eventpoll.c).
void EventWaiter::waiter_sleep(Nanoseconds until) {
  pollfd both[] = {{waiter_bell_.get(), POLLIN, 0}, {sources_.get(), POLLIN, 0}};
  const Nanoseconds left = until == never ? 0 : std::max<Nanoseconds>(until - now(), 0);
  const timespec limit{left / seconds(1), left % seconds(1)};
  const int count = ::ppoll(both, 2, until == never ? nullptr : &limit, nullptr);
  if (count > 0 && (both[0].revents & POLLIN) != 0) drain(waiter_bell_.get());
}

void EventWaiter::rearm() {
  if (!disarmed_.exchange(false, std::memory_order_seq_cst)) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.u64 = 1;
  ::epoll_ctl(engine_.get(), EPOLL_CTL_MOD, sources_.get(), &event);
}

void EventWaiter::wake() {
  const Attention who = attention();
  if (who == Attention::waiter_sleeps) ring(waiter_bell_.get());
  else if (who != Attention::awake) ring(engine_bell_.get());
}

void EventWaiter::ring_engine() { ring(engine_bell_.get()); }

void EventWaiter::set_timer(Nanoseconds delay) {
  const Nanoseconds expiry = now() + delay;
  if (expires_at_.load(std::memory_order_seq_cst) <= expiry) return;  // take_events() comes before a check for work
  expires_at_.store(expiry, std::memory_order_seq_cst);
  itimerspec when{};
  when.it_value.tv_sec = delay / seconds(1);
  when.it_value.tv_nsec = std::max<Nanoseconds>(delay % seconds(1), 1);
  ::timerfd_settime(timer_.get(), 0, &when, nullptr);
}

EventWaiter::WakeEvents EventWaiter::take_events() {
  WakeEvents found;
  epoll_event events[16];
  const int count = ::epoll_wait(sources_.get(), events, 16, 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t kind = events[i].data.u64 >> 32 << 32;
    const int slot = static_cast<int>(events[i].data.u64 & 0xffffffff);
    if (kind == tag_timer) {
      drain(timer_.get());
      expires_at_.store(never, std::memory_order_seq_cst);
    }
    if (kind == tag_local_peer) {
      const bool polite = local_peers_->has_finished(slot);
      local_peers_->stop_watching(slot);  // the first event of its two descriptors is enough
      if (!polite) found.deaths.push_back(slot);
    }
    if (kind == tag_link) found.of_links = true;
  }
  return found;
}

}  // namespace sirtaki
