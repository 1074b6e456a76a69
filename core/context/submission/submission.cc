#include "context/submission/submission.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/text.h"

namespace sirtaki {
namespace {

constexpr double longest_operation_deadline = 1e6;  // seconds

Status refuse(const std::string& name, const std::string& reason, srt_status code = SRT_INVALID_ARGUMENT) {
  return {code, format("'%s': %s", printable(name, 200).c_str(), reason.c_str())};
}

Status check_name(std::string_view name) {
  if (name.empty() || name.size() > longest_name)
    return {SRT_INVALID_ARGUMENT,
            format("a tensor's name must have 1 to %zu bytes, this one has %zu", longest_name, name.size())};
  if (const size_t at = find_unprintable(name); at != std::string_view::npos)
    return {SRT_INVALID_ARGUMENT,
            format("the tensor name '%s' has a control character, or bytes that are not UTF-8, at byte %zu",
                   printable(name, 100).c_str(), at)};
  return Status::ok();
}

Status check_shape(const srt_request& request, Signature& signature) {
  const bool is_list = changes_process_sets(signature.kind);  // the shape is a list of ranks
  const int32_t most = is_list ? 1 << 20 : static_cast<int32_t>(most_dimensions);
  if (request.dimensions < 0 || request.dimensions > most)
    return refuse(signature.name,
                  format("a tensor may have up to %d dimensions, this one has %d", most, request.dimensions));
  if (request.dimensions > 0 && !request.shape) return refuse(signature.name, "the shape is missing");
  signature.shape.assign(request.shape, request.shape + request.dimensions);
  if (is_list) return Status::ok();
  int64_t bytes = static_cast<int64_t>(dtype_bytes(signature.dtype));
  for (int64_t extent : signature.shape) {
    if (extent < 0) return refuse(signature.name, "a dimension is negative");
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes))
      return refuse(signature.name, "the tensor is larger than memory can be");
  }
  return Status::ok();
}

Status check_reduction(const srt_request& request, const Signature& signature) {
  if (request.reduce_op < 0 || request.reduce_op > static_cast<int32_t>(last_reduce_op))
    return refuse(signature.name, format("there is no reduce op %d", request.reduce_op));
  const auto op = static_cast<ReduceOp>(request.reduce_op);
  if (!(dtype_entry(request.dtype)->reduce_ops & 1 << request.reduce_op))
    return refuse(signature.name,
                  format("%s cannot combine elements of dtype %s with the reduce op %s; convert the tensor first, for "
                         "example to float32",
                         kind_name(signature.kind), dtype_name(signature.dtype), reduce_op_name(op)),
                  SRT_UNSUPPORTED);
  if (!reduces_with(signature.kind, op))
    return refuse(
        signature.name,
        format("%s does not support op=Adasum; use op=Average or op=Sum, or an all-reduce", kind_name(signature.kind)),
        SRT_UNSUPPORTED);
  for (const auto& [what, value] : {std::pair{"prescale", request.prescale}, std::pair{"postscale", request.postscale}})
    if (!std::isfinite(value))
      return refuse(signature.name, format("the %s factor is %g; it must be a finite number", what, value));
  return Status::ok();
}

Status check_wire_format(const srt_request& request, const Signature& signature) {
  if (request.wire_format == SRT_WIRE_EXACT) return Status::ok();
  const srt_wire_format* wanted = wire_format_entry(request.wire_format);
  if (!wanted) return refuse(signature.name, format("there is no wire format %d", request.wire_format));
  if (request.device >= 0)
    return refuse(signature.name,
                  format("the wire format %s is for tensors on the CPU, and this one is on GPU %d; send it without a "
                         "wire format, or copy it to the CPU first",
                         wanted->name, request.device),
                  SRT_UNSUPPORTED);
  if (signature.may_be_encoded()) return Status::ok();
  return refuse(signature.name,
                format("the wire format %s is for sums and averages of float32 by an all-reduce, and this is a%s %s of "
                       "%s%s%s",
                       wanted->name, signature.kind == Kind::allreduce ? "n" : "", kind_name(signature.kind),
                       dtype_name(signature.dtype), reduces(signature.kind) ? " with the reduce op " : "",
                       reduces(signature.kind) ? reduce_op_name(signature.reduce_op) : ""),
                SRT_UNSUPPORTED);
}

std::string list(const std::vector<int32_t>& ranks) {
  constexpr size_t most = 8;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), most); ++i) text += format(i ? ", %d" : "%d", ranks[i]);
  return ranks.size() > most ? text + ", ..." : text;
}

Status check_process_set(const Caller& caller, const Signature& signature) {
  const ProcessSetEntry* set = caller.state.sets.find(signature.process_set);
  if (!set) return refuse(signature.name, format("there is no process set %d", signature.process_set));
  if (!set->has(caller.rank))
    return refuse(
        signature.name,
        format("rank %d is not a member of process set %d, whose ranks are %s; only they call operations on it",
               caller.rank, signature.process_set, list(set->members).c_str()));
  if (set->is_joined)
    return refuse(signature.name, format("rank %d has called join() for process set %d, and takes part in nothing else "
                                         "there until join() returns",
                                         caller.rank, signature.process_set));
  if (changes_process_sets(signature.kind) && signature.process_set != world_set)
    return refuse(signature.name, "process sets are added and removed by all ranks of the world");
  return Status::ok();
}

Status check_rank(const Signature& signature, const char* role, int32_t rank, const Caller& caller) {
  const ProcessSetEntry& set = *caller.state.sets.find(signature.process_set);
  if (set.has(rank)) return Status::ok();
  if (rank < 0 || rank >= caller.world_size)
    return refuse(signature.name,
                  format("the %s %d is not in this job (ranks 0 to %d)", role, rank, caller.world_size - 1));
  return refuse(signature.name, format("the %s %d is not one of the ranks %s", role, rank, list(set.members).c_str()));
}

// Fills in the splits; without given ones, the tensor is split into equal parts.
Status fill_splits(const srt_request& request, const ProcessSetEntry& set, Signature& signature) {
  const auto members = static_cast<int64_t>(set.members.size());
  const int64_t rows = signature.shape.front();
  if (!request.splits) {
    if (rows % members)
      return refuse(signature.name,
                    format("%s cannot cut %lld rows into %lld equal parts; pass splits", kind_name(signature.kind),
                           static_cast<long long>(rows), static_cast<long long>(members)));
    signature.splits.assign(static_cast<size_t>(members), rows / members);
    return Status::ok();
  }
  if (request.split_count != members)
    return refuse(signature.name, format("there are %d splits, but one for each of the %lld ranks is needed",
                                         request.split_count, static_cast<long long>(members)));
  int64_t left = rows;
  for (int64_t i = 0; i < members; ++i) {
    if (request.splits[i] < 0) return refuse(signature.name, "a split is negative");
    if (request.splits[i] > left)
      return refuse(signature.name,
                    format("the splits add up to more than the tensor's %lld rows", static_cast<long long>(rows)));
    left -= request.splits[i];
  }
  signature.splits.assign(request.splits, request.splits + members);
  return Status::ok();
}

Status check_dimensions(const Signature& signature) {
  if (!cuts_rows(signature.kind) || !signature.shape.empty()) return Status::ok();
  return refuse(signature.name, format("%s works along the first dimension, and a zero-dimensional tensor has none; "
                                       "reshape it to (1,)",
                                       kind_name(signature.kind)));
}

bool overlap(uintptr_t a, int64_t a_bytes, uintptr_t b, int64_t b_bytes) {
  return a < b + static_cast<uintptr_t>(b_bytes) && b < a + static_cast<uintptr_t>(a_bytes);
}

// Returns how many bytes of the caller's output the operation fills.
int64_t bytes_written(const Signature& signature, const Caller& caller) {
  if (traits(signature.kind).output != Output::rows) return signature.bytes();
  const std::vector<int32_t>& members = caller.state.sets.find(signature.process_set)->members;
  const auto position = std::lower_bound(members.begin(), members.end(), caller.rank) - members.begin();
  return rows_of_member(signature.shape.front(), members.size(), static_cast<size_t>(position)) * signature.row_bytes();
}

Status check_memory(const srt_request& request, const Caller& caller, const Signature& signature) {
  const Kind kind = signature.kind;
  if (!moves_tensors(kind) || signature.bytes() == 0) return Status::ok();
  const bool is_receiver = traits(kind).is_of_a_pair && request.root != caller.rank;
  const bool is_sender = traits(kind).is_of_a_pair && request.root == caller.rank;
  const bool gives_nothing = kind == Kind::allreduce && request.flags & SRT_REQUEST_ABSENT;
  if (!request.input && !gives_nothing && !is_receiver) return refuse(signature.name, "the input pointer is null");
  if (is_ragged(kind) && request.output && request.output_bytes < 0)
    return refuse(signature.name, "output_bytes is negative");
  if (is_ragged(kind) || is_sender) return Status::ok();
  const int64_t output_bytes = bytes_written(signature, caller);
  if (output_bytes && !request.output) return refuse(signature.name, "the output pointer is null");
  const bool may_be_the_same = traits(kind).output == Output::whole;
  if (request.input && !(may_be_the_same && request.input == request.output) &&
      overlap(request.input, signature.bytes(), request.output, output_bytes))
    return refuse(signature.name, may_be_the_same ? "input and output overlap without being the same memory"
                                                  : "input and output overlap");
  return Status::ok();
}

// Checks the ranks of a process set that its members add by themselves: the coordinator waits for these ranks.
Status check_added_members(const Caller& caller, const Signature& signature) {
  if (are_ranks_with(signature.shape, static_cast<size_t>(caller.world_size), caller.rank)) return Status::ok();
  return refuse(signature.name, format("a process set that its members add names ranks from 0 to %d, in ascending "
                                       "order, and rank %d among them",
                                       caller.world_size - 1, caller.rank));
}

// A member of a group without a name, which is numbered by the core.
struct GroupMember {
  int64_t group = 0;
  int32_t index = 0;
  int32_t left = 0;  // members that follow
};

bool is_in_unnamed_group(const srt_request& request) {
  return !request.name && request.group_size > 0 && request.group_id == 0;
}

// Checks that a group without a name is submitted as a whole: `count` requests follow, the first included.
Status check_group(const srt_request* requests, int32_t count) {
  const auto belongs = [&](const srt_request& other) {
    return is_in_unnamed_group(other) && other.group_size == requests->group_size && other.kind == requests->kind &&
           other.process_set == requests->process_set;
  };
  if (requests->group_size <= count && std::all_of(requests, requests + requests->group_size, belongs))
    return Status::ok();
  return {SRT_INVALID_ARGUMENT,
          "a group without a name consists of requests of one kind and process set, which are "
          "submitted together"};
}

// Makes `member` the next member of its group, or the first of the group that begins with these requests.
Status enter_group(const srt_request* requests, int32_t count, HandleTable& handles, GroupMember& member) {
  if (member.left > 0) {
    ++member.index;
    --member.left;
    return Status::ok();
  }
  SIRTAKI_TRY(check_group(requests, count));
  member = {handles.next_group(requests->process_set, requests->kind), 0, requests->group_size - 1};
  return Status::ok();
}

// Returns the group's id, which is even: ids that callers derive from names are odd.
int64_t id_of(const GroupMember& member, Kind kind) {
  return 2 * (member.group + 1 + HandleTable::groups_before_wrap * static_cast<int64_t>(kind));
}

Status check_kind(const srt_request& request, const Caller& caller, Signature& signature) {
  const ProcessSetEntry& set = *caller.state.sets.find(signature.process_set);
  if (reduces(signature.kind)) SIRTAKI_TRY(check_reduction(request, signature));
  const KindTraits& kind = traits(signature.kind);
  if (kind.has_root && !kind.is_of_a_pair && moves_tensors(kind.kind))
    SIRTAKI_TRY(check_rank(signature, "root rank", request.root, caller));
  if (kind.is_of_a_pair) {
    SIRTAKI_TRY(check_rank(signature, "sending rank", request.root, caller));
    SIRTAKI_TRY(check_rank(signature, "receiving rank", request.destination, caller));
    if (request.root == request.destination) return refuse(signature.name, "a rank cannot send to itself");
    if (caller.rank != request.root && caller.rank != request.destination)
      return refuse(signature.name, format("rank %d takes no part in what rank %d sends to rank %d", caller.rank,
                                           request.root, request.destination));
  }
  SIRTAKI_TRY(check_dimensions(signature));
  if (kind.has_splits) SIRTAKI_TRY(fill_splits(request, set, signature));
  const bool has_group = request.group_id || is_in_unnamed_group(request);
  if (has_group != (request.group_size > 0) || request.group_id < 0 || request.group_size < 0)
    return refuse(signature.name, "group_id and group_size go together, and are positive");
  if (has_group && !kind.is_groupable)
    return refuse(signature.name, "only what all ranks of a process set call can be grouped");
  return check_memory(request, caller, signature);
}

void set_memory(const srt_request& request, const Caller& caller, const Signature& signature, HandleEntry& out) {
  if (!moves_tensors(signature.kind)) return;
  const bool is_of_a_pair = traits(signature.kind).is_of_a_pair;
  if (!is_of_a_pair || request.root == caller.rank) out.input = request.input;
  if (is_of_a_pair && request.root == caller.rank) return;
  const bool is_size_known = !is_ragged(signature.kind);
  (is_size_known ? out.output : out.offered) = request.output;
  if (request.output) out.output_bytes = is_size_known ? bytes_written(signature, caller) : request.output_bytes;
}

// Returns the name with its pair of ranks, because other pairs of the set may use the same name.
std::string of_pair(const std::string& name, const srt_request& request) {
  return format("%s (%d to %d)", name.c_str(), request.root, request.destination);
}

// Checks the terms of an operation with a deadline, and gives it its round. The input must survive: a rank that is late
// contributes it later.
Status add_deadline(const srt_request& request, const Caller& caller, Signature& signature) {
  if (!(request.flags & SRT_REQUEST_DEADLINE)) return Status::ok();
  const auto refuse_it = [&](const char* reason) { return refuse(signature.name, reason, SRT_UNSUPPORTED); };
  if (!signature.may_have_deadline())
    return refuse_it(
        "a deadline is for ungrouped all-reduces of tensors on the CPU, of all ranks, with op=Sum or "
        "op=Average and without a wire format");
  if (request.flags & (SRT_REQUEST_ABSENT | SRT_REQUEST_QUEUE_SAME_NAME))
    return refuse_it("a request with a deadline can be neither absent nor queued behind another of its name");
  if (request.input == request.output && signature.bytes())
    return refuse_it("an operation with a deadline cannot work in place: the contribution of a late rank must survive");
  if (!std::isfinite(request.deadline) || request.deadline < 0 || request.deadline > longest_operation_deadline)
    return refuse(signature.name, format("the deadline is %g; it must be 0 to %g seconds", request.deadline,
                                         longest_operation_deadline));
  if (request.quorum < 1 || request.quorum > caller.world_size)
    return refuse(signature.name,
                  format("the quorum is %d ranks; it must be 1 to %d", request.quorum, caller.world_size));
  const uint64_t round = caller.state.handles.next_round(signature.name);
  Signature before = signature;
  before.name += round_suffix(round - 1);
  if (caller.state.handles.is_name_taken(before))
    return refuse(signature.name, "the previous round of this name is still in flight; wait for it first");
  signature.deadline = Deadline{static_cast<int64_t>(request.deadline * 1e9), request.quorum, round};
  signature.name += round_suffix(round);
  return signature.name.size() <= longest_name ? Status::ok() : check_name(signature.name);
}

Status make_name(const srt_request& request, const Caller& caller, const GroupMember& member, Signature& signature) {
  const bool is_pair = traits(signature.kind).is_of_a_pair;
  if (request.name) {
    SIRTAKI_TRY(check_name(request.name));
    signature.name = is_pair ? of_pair(request.name, request) : request.name;
    return signature.name.size() <= longest_name ? Status::ok() : check_name(signature.name);
  }
  if (request.flags & SRT_REQUEST_DEADLINE) {  // its rounds count the calls
    signature.name = "unnamed all-reduce with a deadline";
    return Status::ok();
  }
  if (is_in_unnamed_group(request)) {
    signature.name = format("unnamed grouped %s %lld.%d", kind_name(signature.kind),
                            static_cast<long long>(member.group), member.index);
    return Status::ok();
  }
  const std::string name = format("unnamed %s", kind_name(signature.kind));
  const HandleTable::Series series{request.process_set, static_cast<int32_t>(signature.kind),
                                   is_pair ? request.root : 0, is_pair ? request.destination : 0};
  signature.name = format("%s %lld", (is_pair ? of_pair(name, request) : name).c_str(),
                          static_cast<long long>(caller.state.handles.next_number(series)));
  return Status::ok();
}

Status make_entry(const srt_request& request, const Caller& caller, const GroupMember& member, HandleEntry& out) {
  if (request.struct_size < sizeof(srt_request))
    return {SRT_INVALID_ARGUMENT, "srt_request.struct_size is too small: is another version's header in use?"};
  if (request.kind < 0 || request.kind >= static_cast<int32_t>(kind_count))
    return {SRT_INVALID_ARGUMENT, format("there is no operation kind %d", request.kind)};
  auto signature = std::make_shared<Signature>();
  signature->kind = static_cast<Kind>(request.kind);
  signature->process_set = request.process_set;
  SIRTAKI_TRY(make_name(request, caller, member, *signature));
  const srt_dtype* dtype = dtype_entry(request.dtype);
  if (!dtype) return refuse(signature->name, format("there is no dtype %d", request.dtype), SRT_UNSUPPORTED);
  signature->dtype = static_cast<DType>(request.dtype);
  SIRTAKI_TRY(check_process_set(caller, *signature));
  SIRTAKI_TRY(check_shape(request, *signature));
  SIRTAKI_TRY(check_kind(request, caller, *signature));
  if (reduces(signature->kind)) {
    signature->reduce_op = static_cast<ReduceOp>(request.reduce_op);
    signature->prescale = request.prescale;
    signature->postscale = request.postscale;
  }
  SIRTAKI_TRY(check_wire_format(request, *signature));
  signature->wire_format = static_cast<WireFormat>(request.wire_format);
  if (traits(signature->kind).has_root) signature->root = request.root;
  if (signature->kind == Kind::add_process_set && request.root != 0) {
    signature->root = 1;
    SIRTAKI_TRY(check_added_members(caller, *signature));
  }
  if (traits(signature->kind).is_of_a_pair) signature->destination = request.destination;
  signature->device = request.device;
  signature->priority = request.priority;
  signature->group_size = request.group_size;
  signature->group_id = is_in_unnamed_group(request) ? id_of(member, signature->kind) : request.group_id;
  signature->layout = request.layout;
  SIRTAKI_TRY(add_deadline(request, caller, *signature));
  set_memory(request, caller, *signature, out);
  out.signature = std::move(signature);
  out.is_absent = request.flags & SRT_REQUEST_ABSENT;
  out.on_complete = request.on_complete;
  out.allocate = request.allocate;
  out.user = request.user;
  return Status::ok();
}

// Marks the set as joined: this rank submits nothing to it until all its members have joined. From then on the unnamed
// operations of all members have the same numbers again.
Status begin_join(const Signature& signature, CallerState& state) {
  for (Ticket handle : state.handles.unfinished()) {
    const HandleEntry& entry = *state.handles.open_entry(handle);
    if (entry.state == HandleState::waits_for_name && entry.signature->process_set == signature.process_set)
      return {SRT_INVALID_ARGUMENT, format("'%s' waits for another operation of its name; wait for it before join()",
                                           printable(entry.signature->name, 200).c_str())};
  }
  if (state.handles.has_rounds())
    return {SRT_INVALID_ARGUMENT,
            "join() cannot be combined with operations that have a deadline: ranks count their "
            "rounds, and a rank that has joined would fall behind"};
  state.sets.find(signature.process_set)->is_joined = true;
  state.handles.restart_numbers(signature.process_set);
  return Status::ok();
}

Status open_one(const srt_request& request, const Caller& caller, const GroupMember& member, GpuEventPtr input,
                Ticket& out) {
  HandleEntry entry;
  SIRTAKI_TRY(make_entry(request, caller, member, entry));
  entry.ready = std::move(input);
  HandleTable& handles = caller.state.handles;
  if (handles.is_name_taken(*entry.signature) && request.name && !(request.flags & SRT_REQUEST_QUEUE_SAME_NAME))
    return refuse(entry.signature->name,
                  "an operation of this name is still in flight; wait for it, or choose another name");
  if (const Ticket other = handles.memory().collision(entry.memory_use()))
    return {SRT_INVALID_ARGUMENT,
            format("'%s' would use memory of '%s', which is still in flight; wait for that one first, or pass a copy",
                   printable(entry.signature->name, 200).c_str(),
                   printable(handles.open_entry(other)->signature->name, 200).c_str())};
  if (entry.signature->kind == Kind::join) SIRTAKI_TRY(begin_join(*entry.signature, caller.state));
  if (entry.signature->deadline) handles.begin_round(entry.signature->series());
  out = handles.open(std::move(entry));
  handles.take_name(out);
  return Status::ok();
}

void take_back(const Ticket* tickets, int32_t count, CallerState& state) {
  for (int32_t i = 0; i < count; ++i) {
    if (HandleEntry* entry = state.handles.open_entry(tickets[i])) state.handles.forget_hook(*entry);
    state.end_refused(tickets[i], {SRT_INVALID_ARGUMENT, "another request of the submission was refused"});
    state.handles.release(tickets[i]);
  }
}

}  // namespace

Status open_all(Submission& submission, const Caller& caller) {
  auto& [requests, count, out, inputs, is_attempted] = submission;
  for (int32_t i = 0; count > 1 && i < count; ++i)
    if (requests[i].flags & SRT_REQUEST_DEADLINE)
      return {SRT_INVALID_ARGUMENT, "a request with a deadline is submitted alone"};
  GroupMember member;
  for (int32_t i = 0; i < count; ++i) {
    GpuEventPtr input = inputs.empty() ? nullptr : std::move(inputs[static_cast<size_t>(i)]);
    Status status = Status::ok();
    if (is_in_unnamed_group(requests[i])) status = enter_group(requests + i, count - i, caller.state.handles, member);
    if (status.is_ok()) status = open_one(requests[i], caller, member, std::move(input), out[i]);
    if (status.is_ok()) continue;
    take_back(out, i, caller.state);
    out[0] = 0;
    return status;
  }
  if (is_attempted)
    for (int32_t i = 0; i < count; ++i) caller.state.handles.open_entry(out[i])->is_attempted = true;
  return Status::ok();
}

}  // namespace sirtaki
