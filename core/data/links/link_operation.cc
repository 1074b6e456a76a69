#include "data/links/link_operation.h"

#include <algorithm>

#include "base/blame.h"
#include "data/adasum.h"
#include "data/links/algorithm.h"

namespace sirtaki {
namespace {

constexpr size_t most_unsent = 2 << 20;   // bytes that may be queued on a link before packing waits
constexpr int64_t worth_referring = 8 << 10;  // bytes from which sending a piece separately is faster than copying it

}  // namespace

LinkOperation::LinkOperation(const LinkSetting& setting, TransferPtr transfer)
    : setting_(setting), transfer_(std::move(transfer)), kernels_(setting.kernels.of(transfer_->dtype)),
      links_(transfer_->members.size()), sources_(transfer_->members.size()) {}

Status LinkOperation::advance(Nanoseconds, Progress& progress) {
  progress = Progress::blocked;
  received_ = false;
  if (!has_links()) return Status::ok();
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
  if (received_) progress = Progress::moved;
  bool sent = true;
  for (Link* link : links_) {
    if (!link) continue;
    if (link->flush()) progress = Progress::moved;
    if (link->unsent()) sent = false;
  }
  if (next_ == steps && sent) progress = Progress::done;
  return Status::ok();
}

// Returns whether all links that the operation needs are there, and requests those that are missing.
bool LinkOperation::has_links() {
  if (is_linked_) return true;
  awaited_.clear();
  for (size_t member = 0; member < member_count(); ++member) {
    if (member == transfer_->own || !exchanges_with(member)) continue;
    const int32_t rank = transfer_->members[member];
    links_[member] = setting_.links.obtain(rank);
    if (!links_[member]) awaited_.push_back(rank);
  }
  return is_linked_ = awaited_.empty();
}

void LinkOperation::pack_bytes(const ScatterList& list, int64_t begin, int64_t end, uint8_t* out) const {
  const Nanoseconds start = measures() ? now() : 0;
  Packing{*transfer_, setting_.kernels}.pack(list, begin, end, out);
  if (measures()) transfer_->times->packing += now() - start;
}

bool LinkOperation::has_room(size_t member) const { return !links_[member] || links_[member]->unsent() < most_unsent; }

bool LinkOperation::all_have_room() const {
  for (size_t member = 0; member < member_count(); ++member)
    if (!has_room(member)) return false;
  return true;
}

FrameHeader LinkOperation::header(int64_t tag, int64_t bytes) const {
  return {static_cast<uint32_t>(bytes), FrameKind::data, static_cast<uint16_t>(tag), transfer_->plan};
}

std::span<uint8_t> LinkOperation::compose(size_t member, int64_t tag, int64_t bytes) {
  return link(member).compose(header(tag, bytes));
}

void LinkOperation::send_inputs(size_t member, int64_t tag, const ScatterList& list, int64_t begin, int64_t end) {
  Link& to = link(member);
  to.begin(header(tag, end - begin));
  list.visit(begin, end, [&](const uint8_t* input, uint8_t*, int64_t offset, int64_t bytes) {
    const auto count = static_cast<size_t>(bytes);
    if (input && transfer_->prescale.is_one() && bytes >= worth_referring) to.add_elsewhere({input, count});
    else pack_bytes(list, begin + offset, begin + offset + bytes, to.add(count).data());
  });
}

void LinkOperation::send_results(size_t member, int64_t tag, const ScatterList& list, int64_t begin, int64_t end,
                                 const uint8_t* scratch) {
  Link& to = link(member);
  to.begin(header(tag, end - begin));
  list.visit(begin, end, [&](const uint8_t*, const uint8_t* output, int64_t offset, int64_t bytes) {
    const auto count = static_cast<size_t>(bytes);
    if (output && bytes >= worth_referring) to.add_elsewhere({output, count});
    else std::copy_n(output ? output : scratch + offset, count, to.add(count).begin());
  });
}

Status LinkOperation::take(size_t member, int64_t tag, const ScatterList& list, int64_t begin, int64_t end,
                           bool& finished) {
  const std::span<uint8_t> place = list.output_of(begin, end);
  if (place.data()) link(member).place(header(tag, end - begin), place);
  std::span<const uint8_t> body;
  SIRTAKI_TRY(arrived(member, tag, end - begin, body));
  finished = body.data() != nullptr;
  if (!finished) return Status::ok();
  if (body.data() != place.data()) unpack(list, begin, end, body.data());
  consume(member);
  return Status::ok();
}

void LinkOperation::reduce(std::span<const uint8_t* const> bodies, const ScatterList& list, int64_t begin, int64_t end,
                           std::vector<uint8_t>& scratch) {
  bool is_in_place = transfer_->prescale.is_one();
  list.visit(begin, end,
             [&](const uint8_t* input, const uint8_t* output, int64_t, int64_t) { is_in_place &= input && output; });
  if (!is_in_place) {
    scratch.resize(static_cast<size_t>(end - begin));
    pack_bytes(list, begin, end, scratch.data());
  }
  list.visit(begin, end, [&](const uint8_t* input, uint8_t* output, int64_t offset, int64_t bytes) {
    for (size_t member = 0; member < member_count(); ++member)
      if (member != transfer_->own) sources_[member] = bodies[member] + offset;
    sources_[transfer_->own] = is_in_place ? input : scratch.data() + offset;
    reduce_kernel()(output ? output : scratch.data() + offset, sources_.data(), static_cast<int>(member_count()),
                    static_cast<size_t>(bytes) / transfer_->element_bytes(), transfer_->postscale);
  });
}

// Stops all use of the tensors' memory, which returns to its owners.
void LinkOperation::cancel() {
  for (Link* link : links_)
    if (link) link->drop_references();
}

Status LinkOperation::arrived(size_t member, int64_t tag, int64_t bytes, std::span<const uint8_t>& body) {
  body = {};
  const Frame* frame = nullptr;
  Status status = link(member).front(frame);
  while (status.is_ok() && !frame && link(member).receive()) {
    received_ = true;
    status = link(member).front(frame);
  }
  const int32_t sender = transfer_->members[member];
  if (!status.is_ok()) return blame(setting_.names, sender, status);
  if (!frame || frame->header.kind != FrameKind::data) {
    awaited_.push_back(sender);
    return Status::ok();
  }
  if (frame->header.plan != transfer_->plan || frame->header.step != static_cast<uint16_t>(tag) ||
      frame->header.length != bytes)
    return blame(
        setting_.names, sender,
        {SRT_PROTOCOL, format("transfer %u of operation %llu with %u bytes arrived, where transfer %u of "
                              "operation %llu with %lld bytes was due",
                              frame->header.step, static_cast<unsigned long long>(frame->header.plan),
                              frame->header.length, static_cast<unsigned>(tag & 0xffff),
                              static_cast<unsigned long long>(transfer_->plan), static_cast<long long>(bytes))});
  // An empty body must be distinguishable from a missing one.
  static constexpr uint8_t nothing = 0;
  body = frame->body.empty() ? std::span<const uint8_t>(&nothing, size_t{0}) : frame->body;
  return Status::ok();
}

Status LinkOperation::all_arrived(int64_t tag, int64_t bytes, std::vector<const uint8_t*>& bodies, bool& all_here) {
  all_here = true;
  bodies.resize(member_count());
  for (size_t member = 0; member < member_count(); ++member) {
    if (member == transfer_->own) continue;
    std::span<const uint8_t> body;
    SIRTAKI_TRY(arrived(member, tag, bytes, body));
    bodies[member] = body.data();
    if (!body.data()) all_here = false;
  }
  return Status::ok();
}

void LinkOperation::consume_all() {
  for (size_t member = 0; member < member_count(); ++member)
    if (member != transfer_->own) consume(member);
}

bool LinkBackend::serves(const Transfer& transfer) const {
  if (transfer.device >= 0) return false;
  for (size_t member = 0; member < transfer.members.size(); ++member)
    if (member != transfer.own && !setting_.links.can_reach(transfer.members[member])) return false;
  return true;
}

std::unique_ptr<Operation> LinkBackend::start(TransferPtr transfer) {
  switch (transfer->kind) {
    case Kind::allreduce:
      if (transfer->reduce_op == ReduceOp::adasum) return make_adasum(*this, setting_.kernels, std::move(transfer));
      return start_allreduce(std::move(transfer));
    case Kind::broadcast: return make_link_broadcast(setting_, std::move(transfer));
    case Kind::reducescatter: return make_link_reducescatter(setting_, std::move(transfer));
    case Kind::allgather:
    case Kind::alltoall: return make_link_exchange(setting_, std::move(transfer));
    default: return nullptr;  // a barrier is complete once it is decided
  }
}

std::unique_ptr<Operation> LinkBackend::start_allreduce(TransferPtr transfer) const {
  if (transfer->wire_format != WireFormat::exact) return make_quantised_allreduce(setting_, std::move(transfer));
  switch (choose_algorithm(wish_, count_members(transfer->members, host_of_), transfer->buffer.bytes())) {
    case Algorithm::ring: return make_ring_allreduce(setting_, std::move(transfer));
    case Algorithm::recursive_doubling: return make_recursive_doubling(setting_, std::move(transfer));
    default: return make_direct_allreduce(setting_, std::move(transfer));
  }
}

}  // namespace sirtaki
