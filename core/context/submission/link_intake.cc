#include "context/submission/link_intake.h"

#include <algorithm>

namespace sirtaki {

bool LinkIntake::crosses(int32_t peer) const {
  return rules_.host_of[static_cast<size_t>(peer)] != rules_.host_of[static_cast<size_t>(rules_.rank)];
}

Status LinkIntake::check(int32_t peer, int fd, bool is_encrypted) const {
  if (peer < 0 || static_cast<size_t>(peer) >= rules_.host_of.size() || peer == rules_.rank || fd < 0)
    return {SRT_INVALID_ARGUMENT, format("there can be no link to rank %d over descriptor %d", peer, fd)};
  if (is_closed_) return {SRT_SHUT_DOWN, format("rank %d needs no link to rank %d any more", rules_.rank, peer)};
  if (is_started_ && !allows_requests_) return {SRT_INVALID_ARGUMENT, "links are added before srt_start"};
  if (linked_.count(peer)) return {SRT_INVALID_ARGUMENT, format("there is a link to rank %d already", peer)};
  if (is_encrypted && !rules_.encrypts)
    return {SRT_INVALID_ARGUMENT, format("the link to rank %d is encrypted, and should not be", peer)};
  const auto known = parts_.find(peer);
  const bool is_mixed = known != parts_.end() && (known->second.channels.empty() ? is_encrypted : !is_encrypted);
  if (is_mixed || (!is_encrypted && rules_.encrypts && crosses(peer)))
    return {SRT_INVALID_ARGUMENT, format("the link to rank %d has to be encrypted, and is not", peer)};
  return Status::ok();
}

Status LinkIntake::add_socket(int32_t peer, int fd, bool& is_complete) {
  const MutexLock lock(mutex_);
  SIRTAKI_TRY(check(peer, fd, false));
  parts_[peer].sockets.emplace_back(fd);
  is_complete = complete(peer);
  return Status::ok();
}

Status LinkIntake::add_tls(int32_t peer, int fd, std::unique_ptr<TlsSession>& session, bool& is_complete) {
  const MutexLock lock(mutex_);
  SIRTAKI_TRY(check(peer, fd, true));
  parts_[peer].channels.emplace_back(Descriptor(fd), std::move(session));
  is_complete = complete(peer);
  return Status::ok();
}

// Hands a link to the driver if all its connections are there.
bool LinkIntake::complete(int32_t peer) {
  Parts& parts = parts_[peer];
  if (!is_started_ || parts.sockets.size() + parts.channels.size() < (crosses(peer) ? rules_.channels : 1))
    return false;
  news_.made.push_back({peer, make_pipe(std::move(parts))});
  parts_.erase(peer);
  linked_.insert(peer);
  has_news_.store(true, std::memory_order_seq_cst);
  return true;
}

std::unique_ptr<BytePipe> LinkIntake::make_pipe(Parts parts) const {
  if (!parts.channels.empty()) return std::make_unique<TlsPipe>(std::move(parts.channels), rules_.probes_after);
  return std::make_unique<SocketPipe>(std::move(parts.sockets), rules_.probes_after);
}

Status LinkIntake::wait_for_requests(size_t most, Nanoseconds timeout, std::vector<int32_t>& out) {
  const Nanoseconds deadline = now() + timeout;
  MutexLock lock(mutex_);
  for (;;) {
    if (is_closed_) return {SRT_SHUT_DOWN, "no further link is needed"};
    if (!requests_.empty()) break;
    const Nanoseconds left = deadline - now();
    if (left <= 0) return {SRT_IN_PROGRESS, "no link was asked for"};
    lock.wait_for(changed_, left);
  }
  const auto end = requests_.begin() + static_cast<ptrdiff_t>(std::min(most, requests_.size()));
  out.assign(requests_.begin(), end);
  requests_.erase(requests_.begin(), end);
  return Status::ok();
}

void LinkIntake::fail(int32_t peer, std::string text) {
  const MutexLock lock(mutex_);
  if (is_closed_) return;
  if (!news_.failed) news_.failed = {peer, std::move(text)};
  has_news_.store(true, std::memory_order_seq_cst);
}

void LinkIntake::start(Links& links) {
  const MutexLock lock(mutex_);
  is_started_ = true;
  if (allows_requests_) links.allow_requests();
  for (auto& [peer, parts] : parts_) {
    links.add_socket(peer, make_pipe(std::move(parts)));
    linked_.insert(peer);
  }
  parts_.clear();
}

void LinkIntake::ask(const std::vector<int32_t>& peers) {
  const MutexLock lock(mutex_);
  requests_.insert(requests_.end(), peers.begin(), peers.end());
  changed_.notify_all();
}

LinkIntake::News LinkIntake::take() {
  const MutexLock lock(mutex_);
  has_news_.store(false, std::memory_order_relaxed);
  return std::exchange(news_, {});
}

void LinkIntake::close() {
  if (is_closed_.exchange(true)) return;
  const MutexLock lock(mutex_);
  parts_.clear();
  news_ = {};
  has_news_.store(false, std::memory_order_relaxed);
  changed_.notify_all();
}

// Closes the connections that wait for the start. No other thread exists, and any lock may be held for ever; after
// the start, another thread may have been inside this object when the process forked.
void LinkIntake::forked() {
  if (!is_started_) parts_.clear();
}

}  // namespace sirtaki
