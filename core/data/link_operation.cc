#include "data/link_operation.h"

#include <algorithm>

#include "data/adasum.h"
#include "data/algorithm.h"

namespace sirtaki {
namespace {

constexpr int steps_a_call = 8;           // then negotiation has its turn
constexpr size_t most_unsent = 2 << 20;   // bytes that may pile up on a link before packing waits

}  // namespace

LinkOperation::LinkOperation(const LinkSetting& setting, std::shared_ptr<const Transfer> transfer)
    : setting_(setting), transfer_(std::move(transfer)), kernels_(setting.kernels.of(transfer_->dtype)) {}

Status LinkOperation::advance(Nanoseconds, Progress& progress) {
  progress = Progress::blocked;
  for (int budget = steps_a_call; budget > 0 && next_ < steps; --budget) {
    awaited_.clear();
    bool finished = false;
    const Nanoseconds start = measures() ? now() : 0;
    SIRTAKI_TRY(step(next_, finished));
    if (!finished) break;
    if (measures()) transfer_->times->working += now() - start;
    ++next_;
    progress = Progress::moved;
  }
  bool sent = true;
  for (size_t member = 0; member < member_count(); ++member) {
    if (member == transfer_->own) continue;
    if (link(member).flush()) progress = Progress::moved;
    if (link(member).unsent()) sent = false;
  }
  if (next_ == steps && sent) progress = Progress::done;
  return Status::ok();
}

void LinkOperation::pack_bytes(const ScatterList& list, int64_t begin, int64_t end, uint8_t* out) const {
  const Nanoseconds start = measures() ? now() : 0;
  Packing{*transfer_, setting_.kernels}.pack(list, begin, end, out);
  if (measures()) transfer_->times->packing += now() - start;
}

bool LinkOperation::has_room(size_t member) const {
  return member == transfer_->own || link(member).unsent() < most_unsent;
}

bool LinkOperation::all_have_room() const {
  for (size_t member = 0; member < member_count(); ++member)
    if (!has_room(member)) return false;
  return true;
}

std::span<uint8_t> LinkOperation::compose(size_t member, int64_t tag, int64_t bytes) {
  FrameHeader header;
  header.length = static_cast<uint32_t>(bytes);
  header.step = static_cast<uint16_t>(tag);
  header.plan = transfer_->plan;
  return link(member).compose(header);
}

Status LinkOperation::arrived(size_t member, int64_t tag, int64_t bytes, std::span<const uint8_t>& body) {
  body = {};
  const Frame* frame = nullptr;
  SIRTAKI_TRY(link(member).front(frame));
  if (!frame && link(member).receive()) SIRTAKI_TRY(link(member).front(frame));
  if (!frame || frame->header.kind != FrameKind::data) {
    awaited_.push_back(transfer_->members[member]);
    return Status::ok();
  }
  if (frame->header.plan != transfer_->plan || frame->header.step != static_cast<uint16_t>(tag) ||
      frame->header.length != bytes)
    return {SRT_PROTOCOL, format("%s sent transfer %u of operation %llu with %u bytes, where transfer %u of operation "
                                 "%llu with %lld bytes was due",
                                 setting_.names[static_cast<size_t>(transfer_->members[member])].c_str(),
                                 frame->header.step, static_cast<unsigned long long>(frame->header.plan),
                                 frame->header.length, static_cast<unsigned>(tag & 0xffff),
                                 static_cast<unsigned long long>(transfer_->plan), static_cast<long long>(bytes))};
  // An empty body still has to be told from none.
  static constexpr uint8_t nothing = 0;
  body = frame->body.empty() ? std::span<const uint8_t>(&nothing, size_t{0}) : frame->body;
  return Status::ok();
}

bool LinkBackend::serves(const Transfer& transfer) const {
  if (transfer.device >= 0) return false;
  for (size_t member = 0; member < transfer.members.size(); ++member)
    if (member != transfer.own && !setting_.links.data(transfer.members[member])) return false;
  return true;
}

std::unique_ptr<Operation> LinkBackend::start(std::shared_ptr<const Transfer> transfer) {
  switch (transfer->kind) {
    case Kind::allreduce:
      if (transfer->reduce_op == ReduceOp::adasum) return make_adasum(*this, setting_.kernels, std::move(transfer));
      return start_allreduce(std::move(transfer));
    case Kind::broadcast: return make_link_broadcast(setting_, std::move(transfer));
    case Kind::reducescatter: return make_link_reducescatter(setting_, std::move(transfer));
    case Kind::allgather:
    case Kind::alltoall: return make_link_exchange(setting_, std::move(transfer));
    default: return nullptr;  // a barrier is over once it is decided
  }
}

std::unique_ptr<Operation> LinkBackend::start_allreduce(std::shared_ptr<const Transfer> transfer) const {
  switch (choose_algorithm(wish_, count_members(transfer->members, host_of_), transfer->buffer.bytes())) {
    case Algorithm::ring: return make_ring_allreduce(setting_, std::move(transfer));
    case Algorithm::recursive_doubling: return make_recursive_doubling(setting_, std::move(transfer));
    default: return make_direct_allreduce(setting_, std::move(transfer));
  }
}

}  // namespace sirtaki
