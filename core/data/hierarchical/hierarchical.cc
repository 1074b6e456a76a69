#include "data/hierarchical/hierarchical.h"

#include <algorithm>
#include <map>

#include "data/links/algorithm.h"
#include "data/packing.h"

namespace sirtaki {
namespace {

constexpr int64_t least_bytes = 4 << 20, bytes_a_member = 1 << 20, most_pieces = 100;  // limits of pieces

// Returns a list with each part of `list` replaced by the result of `part`.
template <typename Part>
ScatterList map_parts(const ScatterList& list, Part&& part) {
  ScatterList mapped;
  list.visit(0, list.bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
    const auto [from, to] = part(input, output, bytes);
    mapped.add(from, to, bytes);
  });
  return mapped;
}

using Ends = std::pair<const uint8_t*, uint8_t*>;

// Returns whether the sums of a host, which are stored in the tensors' dtype, may wrap around before they are divided.
bool may_wrap(const Transfer& transfer) {
  switch (transfer.dtype) {
    case DType::uint8:
    case DType::int8:
    case DType::uint16:
    case DType::int16: return !transfer.postscale.is_one();
    default: return false;
  }
}

// Returns whether a float dtype has a smaller range than 32 bits: the sum of a host may be infinite where that of all
// ranks, or their average, is not.
bool has_small_range(DType dtype) {
  return dtype == DType::complex32 || (dtype_bytes(dtype) == 1 && dtype >= DType::float8_e4m3fn) ||
         dtype == DType::float16;
}

}  // namespace

// Sums of a reduce-scatter are exchanged among the members at one place of each host, so hosts have equally many. What
// a sum of hosts' sums cannot represent is added up directly, in 32 bits.
bool HierarchicalBackend::serves(const Transfer& transfer) const {
  if (may_wrap(transfer) || !parts_.between->serves(transfer)) return false;
  const std::vector<int> members = count_members(transfer.members, parts_.host_of);
  if (choose_algorithm(parts_.wish, members, transfer.buffer.bytes()) != Algorithm::hierarchical) return false;
  switch (transfer.kind) {
    case Kind::allreduce: return transfer.reduce_op != ReduceOp::adasum;
    case Kind::reducescatter:
      return !has_small_range(transfer.dtype) && std::ranges::count(members, members.front()) == std::ssize(members);
    case Kind::broadcast:
    case Kind::allgather: return true;
    default: return false;
  }
}

std::unique_ptr<Operation> HierarchicalBackend::start(TransferPtr transfer) {
  switch (transfer->kind) {
    case Kind::broadcast: return make_hierarchical_broadcast(parts_, std::move(transfer));
    case Kind::allgather: return make_hierarchical_allgather(parts_, std::move(transfer));
    case Kind::reducescatter: return make_hierarchical_reducescatter(parts_, std::move(transfer));
    default: return make_hierarchical_allreduce(parts_, std::move(transfer));
  }
}

Hierarchical::Hierarchical(const HierarchyParts& parts, TransferPtr whole)
    : PhasedOperation(*whole), parts_(parts), whole_(std::move(whole)) {
  std::map<int32_t, Members> by_host;
  const auto host_of = [&](size_t member) { return parts_.host_of[static_cast<size_t>(whole_->members[member])]; };
  for (size_t member = 0; member < whole_->members.size(); ++member) by_host[host_of(member)].push_back(member);
  for (auto& [host, members] : by_host) {
    if (host == host_of(whole_->own)) {
      own_host_ = hosts_.size();
      own_place_ = index_in(members, whole_->own);
    }
    hosts_.push_back(std::move(members));
  }
}

std::shared_ptr<Transfer> Hierarchical::among(const Members& members, Kind kind) const {
  auto transfer = std::make_shared<Transfer>();
  transfer->plan = whole_->plan;
  transfer->kind = kind;
  transfer->dtype = whole_->dtype;
  transfer->reduce_op = whole_->reduce_op;
  transfer->chunk_bytes = whole_->chunk_bytes;
  transfer->times = whole_->times;
  transfer->wire_bytes = whole_->wire_bytes;
  transfer->own = index_in(members, whole_->own);
  for (size_t member : members) transfer->members.push_back(whole_->members[member]);
  return transfer;
}

int Hierarchical::add_local(std::shared_ptr<Transfer> transfer, int after) {
  const auto backend =
      std::find_if(parts_.inside.begin(), parts_.inside.end(), [&](const Backend* b) { return b->serves(*transfer); });
  return add(Lane::local, {std::move(transfer), *backend}, after);
}

int Hierarchical::add_between(std::shared_ptr<Transfer> transfer, int after) {
  return add(Lane::between_hosts, {std::move(transfer), parts_.between}, after);
}

size_t Hierarchical::index_in(const Members& members, size_t member) {
  return static_cast<size_t>(std::find(members.begin(), members.end(), member) - members.begin());
}

ScatterList Hierarchical::with_memory(const ScatterList& list) {
  return map_parts(list, [&](const uint8_t* input, uint8_t* output, int64_t bytes) {
    if (!output) {
      memory_.push_back(std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(bytes)));
      output = memory_.back().get();
    }
    return Ends(input, output);
  });
}

ScatterList Hierarchical::in_place(const ScatterList& list) {
  return map_parts(list, [](const uint8_t*, uint8_t* output, int64_t) { return Ends(output, output); });
}

ScatterList Hierarchical::inputs(const ScatterList& list) {
  return map_parts(list, [](const uint8_t* input, uint8_t*, int64_t) { return Ends(input, nullptr); });
}

ScatterList Hierarchical::results(const ScatterList& list) {
  return map_parts(list, [](const uint8_t*, uint8_t* output, int64_t) { return Ends(output, nullptr); });
}

ScatterList Hierarchical::outputs(const ScatterList& list) {
  return map_parts(list, [](const uint8_t*, uint8_t* output, int64_t) { return Ends(nullptr, output); });
}

ScatterList Hierarchical::sizes(const ScatterList& list) {
  return map_parts(list, [](const uint8_t*, uint8_t*, int64_t) { return Ends(nullptr, nullptr); });
}

// Returns the size of a piece, the same on all ranks. A piece is large enough for several rounds of chunks to overlap
// in one phase, because the network idles at the end of each phase, and at most a quarter of a large plan, because
// the network idles while everything goes through shared memory.
int64_t Hierarchical::bytes_a_piece(int64_t total) const {
  const int64_t wanted = bytes_a_member * static_cast<int64_t>(whole_->members.size());
  const int64_t bytes = std::max(std::min(wanted, total / 4), std::max(least_bytes, total / most_pieces));
  return (bytes + 63) / 64 * 64;
}

size_t Hierarchical::count_pieces(const std::vector<ScatterList>& lists) const {
  int64_t total = 0;
  for (const ScatterList& list : lists) total += list.bytes();
  const int64_t each = bytes_a_piece(total);
  return static_cast<size_t>(std::max<int64_t>((total + each - 1) / each, 1));
}

ScatterList Hierarchical::piece_of(const ScatterList& list, size_t piece, size_t pieces) {
  const Slice share = slice_of(list.bytes(), pieces, piece);
  return list.part(share.begin, share.begin + share.bytes);
}

}  // namespace sirtaki
