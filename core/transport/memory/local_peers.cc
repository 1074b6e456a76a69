#include "transport/memory/local_peers.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace sirtaki {
namespace {

// The delay before a doorbell rings. An idle rank may be between two calls: if its engine's thread woke up, the next
// call would find the engine already driven, on the program's own core, and cost two thread switches.
constexpr Nanoseconds grace = microseconds(10), grace_of_idle = microseconds(50);

}  // namespace

Status LocalPeers::open(const Config& config, const srt_memory& memory, std::unique_ptr<LocalPeers>& out) {
  std::unique_ptr<LocalPeers> made(new LocalPeers);
  SIRTAKI_TRY(SharedRegion::open(config, memory.fd, memory.address, memory.slot_count, made->region_));
  if (!memory.address) SIRTAKI_TRY(made->region_->allocate_chunks(memory.fd, memory.slot));
  made->own_slot_ = memory.slot;
  made->arena_ = std::make_unique<SharedArena>(memory.fd, made->region_->arena(), memory.slot_count, memory.slot);
  const bool reads = config.integer(Knob::single_copy) != 0;
  made->memory_ = std::make_unique<PeerMemory>(*made->region_, memory.slot, reads);
  made->ranks_.assign(memory.ranks, memory.ranks + memory.slot_count);
  made->bells_.resize(static_cast<size_t>(memory.slot_count));
  for (int slot = 0; slot < memory.slot_count; ++slot) {
    Bells& bells = made->bells_[static_cast<size_t>(slot)];
    bells.engine = Descriptor::duplicate(memory.engine_doorbells[slot]);
    bells.waiter = Descriptor::duplicate(memory.waiter_doorbells[slot]);
    if (!bells.engine.is_open() || !bells.waiter.is_open())
      return {SRT_SYSTEM, format("a doorbell could not be duplicated: %s", std::strerror(errno))};
    if (slot == memory.slot) continue;
    if (memory.process_fds) bells.process = Descriptor::duplicate(memory.process_fds[slot]);
    if (memory.socket_fds) bells.socket = Descriptor::duplicate(memory.socket_fds[slot]);
  }
  out = std::move(made);
  return Status::ok();
}

int LocalPeers::slot_of(int32_t rank) const {
  const auto found = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
  return found != ranks_.end() && *found == rank ? static_cast<int>(found - ranks_.begin()) : -1;
}

Attention LocalPeers::attention_of(int slot) const {
  return static_cast<Attention>(region_->rank(slot).attention.load(std::memory_order_seq_cst));
}

void LocalPeers::want(int slot, Attention least, Nanoseconds now) {
  Bells& bells = bells_[static_cast<size_t>(slot)];
  const Attention attention = attention_of(slot);
  if (attention < least) return;
  const Nanoseconds due = now + (attention == Attention::idle ? grace_of_idle : grace);
  bells.least = bells.wanted ? std::min(bells.least, least) : least;
  bells.due = bells.wanted ? std::min(bells.due, due) : due;
  bells.wanted = true;
  next_ring_ = std::min(next_ring_, due);
}

void LocalPeers::publish(Milestone milestone, Nanoseconds now) {
  own().milestone.store(milestone.value(), std::memory_order_seq_cst);
  for (int slot = 0; slot < slot_count(); ++slot)
    if (slot != own_slot_) want(slot, Attention::engine_sleeps, now);
}

void LocalPeers::frames_sent(int slot, Nanoseconds now) { want(slot, Attention::idle, now); }

void LocalPeers::ring_due(Nanoseconds now) {
  if (now < next_ring_) return;
  next_ring_ = never;
  for (int slot = 0; slot < slot_count(); ++slot) {
    Bells& bells = bells_[static_cast<size_t>(slot)];
    if (!bells.wanted) continue;
    if (now < bells.due) {
      next_ring_ = std::min(next_ring_, bells.due);
      continue;
    }
    bells.wanted = false;
    if (attention_of(slot) >= bells.least) ring(slot);
  }
}

void LocalPeers::ring(int slot) {
  const Bells& bells = bells_[static_cast<size_t>(slot)];
  const Attention attention = attention_of(slot);
  if (attention == Attention::awake) return;
  const uint64_t one = 1;
  const int bell = attention == Attention::waiter_sleeps ? bells.waiter.get() : bells.engine.get();
  [[maybe_unused]] const ssize_t written = ::write(bell, &one, sizeof one);  // fails only when it already rings
}

void LocalPeers::wake_everyone() {
  for (int slot = 0; slot < slot_count(); ++slot)
    if (slot != own_slot_) ring(slot);
}

void LocalPeers::write_abort(const Abort& abort) {
  AbortRecord& record = region_->abort_record();
  uint32_t none = 0;
  if (!record.state.compare_exchange_strong(none, 1)) return;
  record.status = static_cast<uint32_t>(abort.status);
  record.rank = static_cast<uint32_t>(abort.rank);
  record.decision = abort.decision;
  record.length = static_cast<uint32_t>(std::min(abort.text.size(), sizeof record.text));
  std::memcpy(record.text, abort.text.data(), record.length);
  record.state.store(2, std::memory_order_seq_cst);
}

Abort LocalPeers::read_abort() const {
  const AbortRecord& record = region_->abort_record();
  if (record.state.load(std::memory_order_seq_cst) != 2) return {};
  const size_t length = std::min<size_t>(record.length, sizeof record.text);
  const auto status = static_cast<srt_status>(record.status);
  return {true, StatusTable::is_fatal(status) ? status : SRT_ABORTED, static_cast<int32_t>(record.rank),
          std::string(record.text, length), record.decision};
}

// Each side writes its own word before it reads the other's, in one order for both: either this rank sees that a peer
// has withdrawn, or that peer sees that this rank is writing.
bool LocalPeers::begin_writing(const std::vector<int>& slots) {
  own().writing.store(1, std::memory_order_seq_cst);
  const bool is_welcome = std::ranges::none_of(
      slots, [&](int slot) { return region_->rank(slot).withdrawn.load(std::memory_order_seq_cst) != 0; });
  if (!is_welcome) end_writing();
  return is_welcome;
}

bool LocalPeers::is_writing(int slot) const {
  const Bells& bells = bells_[static_cast<size_t>(slot)];
  if (slot == own_slot_ || bells.is_gone || region_->rank(slot).writing.load(std::memory_order_seq_cst) == 0)
    return false;
  pollfd process{bells.process.get(), POLLIN, 0};
  return !bells.process.is_open() || ::poll(&process, 1, 0) <= 0;
}

void LocalPeers::close() {
  arena_->close();
  for (Bells& bells : bells_)
    for (Descriptor* one : {&bells.engine, &bells.waiter, &bells.process, &bells.socket}) one->close();
}

void LocalPeers::stop_watching(int slot) {
  bells_[static_cast<size_t>(slot)].is_gone = true;
  bells_[static_cast<size_t>(slot)].process.close();
  bells_[static_cast<size_t>(slot)].socket.close();
}

}  // namespace sirtaki
