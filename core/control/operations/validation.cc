#include "control/operations/validation.h"

#include <algorithm>

#include "control/messages/messages.h"

namespace sirtaki {
namespace {

constexpr size_t most_ranks_named = 4;
constexpr size_t most_values_named = 4;
constexpr size_t most_extents_named = 24;
constexpr size_t longest_quoted = 160;
constexpr size_t longest_rank_name = 120;

// Shortens a text at a UTF-8 character boundary, and marks the cut.
std::string shortened(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  size_t end = limit - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

std::string list_extents(const std::vector<int64_t>& extents) {
  std::string text = "[";
  for (size_t i = 0; i < extents.size(); ++i) {
    if (i) text += ", ";
    if (i == most_extents_named) return text + "...]";
    text += std::to_string(extents[i]);
  }
  return text + "]";
}

std::string describe_tensor(const Signature& s) {
  return format("%s of shape %s", dtype_name(s.dtype), list_extents(s.shape).c_str());
}
std::string describe_members(const Signature& s) { return "the ranks " + list_extents(s.shape); }
std::string describe_reduce_op(const Signature& s) { return format("the reduce op %s", reduce_op_name(s.reduce_op)); }
std::string describe_root(const Signature& s) {
  return format(s.kind == Kind::remove_process_set ? "process set %d" : "root rank %d", s.root);
}
std::string describe_scales(const Signature& s) {
  return format("prescale factor %.17g and postscale factor %.17g", s.prescale, s.postscale);
}
std::string describe_wire_format(const Signature& s) {
  return format("the wire format %s", wire_format_name(s.wire_format));
}
std::string describe_device(const Signature& s) {
  return s.device < 0 ? "a tensor on the CPU" : format("a tensor on device %d", s.device);
}
std::string describe_layout(const Signature& s) {
  return s.layout == 0 ? "a row-major tensor" : format("a tensor of memory layout %llx", (unsigned long long)s.layout);
}
std::string describe_group(const Signature& s) {
  if (s.group_id == 0) return "no group";
  return format("group %lld of %d tensors", static_cast<long long>(s.group_id), s.group_size);
}
std::string describe_deadline(const Signature& s) {
  if (!s.deadline) return "no deadline";
  return format("a deadline of %g s and a quorum of %d ranks", static_cast<double>(s.deadline->after) / 1e9,
                s.deadline->quorum);
}
std::string describe_splits(const Signature& s) { return format("%zu splits", s.splits.size()); }

struct Field {
  bool (*differs)(const Signature&, const Signature&);
  std::string (*describe)(const Signature&);
  const char* advice;
};

// The fields in the order in which they are compared; the first difference is reported.
constexpr Field compared_fields[] = {
    {[](const Signature& a, const Signature& b) { return changes_process_sets(a.kind) && a.shape != b.shape; },
     describe_members, "every rank must name the same ranks"},
    {[](const Signature& a, const Signature& b) { return changes_process_sets(a.kind) && a.root != b.root; },
     describe_root, "every rank must name the same process set"},
    {[](const Signature& a, const Signature& b) { return a.dtype != b.dtype; }, describe_tensor,
     "every rank must pass the same dtype"},
    {[](const Signature& a, const Signature& b) { return is_ragged(a.kind) && !agree(a, b) && a.shape != b.shape; },
     describe_tensor, "every rank must pass the same shape, except for the first dimension"},
    {[](const Signature& a, const Signature& b) { return a.shape != b.shape; }, describe_tensor,
     "every rank must pass the same shape"},
    {[](const Signature& a, const Signature& b) { return a.reduce_op != b.reduce_op; }, describe_reduce_op,
     "every rank must pass the same op"},
    {[](const Signature& a, const Signature& b) { return a.root != b.root; }, describe_root,
     "every rank must pass the same root rank"},
    {[](const Signature& a, const Signature& b) { return a.prescale != b.prescale || a.postscale != b.postscale; },
     describe_scales, "every rank must pass the same factors"},
    {[](const Signature& a, const Signature& b) { return a.wire_format != b.wire_format; }, describe_wire_format,
     "every rank must pass the same wire format, or compression"},
    {[](const Signature& a, const Signature& b) { return !same_kind_of_device(a, b); }, describe_device,
     "every rank's tensor must be on the same kind of device"},
    {[](const Signature& a, const Signature& b) { return a.layout != b.layout; }, describe_layout,
     "every rank's tensor must lie in memory in the same order of dimensions, as after tensor.contiguous()"},
    {[](const Signature& a, const Signature& b) { return a.group_id != b.group_id || a.group_size != b.group_size; },
     describe_group, "every rank must group the same tensors"},
    {[](const Signature& a, const Signature& b) { return a.splits.size() != b.splits.size(); }, describe_splits,
     "every rank must pass as many splits"},
    {[](const Signature& a, const Signature& b) { return a.deadline != b.deadline; }, describe_deadline,
     "every rank must pass the same deadline and quorum"},
};

struct Opinion {
  std::string value;
  std::vector<int32_t> ranks;
};

std::string list_opinions(const std::vector<Opinion>& opinions, const RankNames& names) {
  std::string text;
  for (size_t i = 0; i < opinions.size() && i < most_values_named; ++i) {
    if (i) text += ", ";
    text += list_ranks(opinions[i].ranks, names) + (opinions[i].ranks.size() == 1 ? " has " : " have ");
    text += opinions[i].value;
  }
  if (opinions.size() > most_values_named) {
    text += format(", and %zu more values", opinions.size() - most_values_named);
  }
  return text;
}

Status mismatch(const std::string& about, const std::vector<Opinion>& opinions, const char* advice,
                const RankNames& names) {
  return Status(SRT_MISMATCH,
                bounded("ranks disagree about " + about + ": " + list_opinions(opinions, names) + "; " + advice));
}

void add_opinion(std::vector<Opinion>& opinions, std::string value, int32_t rank) {
  for (Opinion& opinion : opinions) {
    if (opinion.value != value) continue;
    opinion.ranks.push_back(rank);
    return;
  }
  opinions.push_back({std::move(value), {rank}});
}

Status disagreement(const OperationEntry& entry, const RankNames& names) {
  for (const Field& field : compared_fields) {
    const bool differs = std::any_of(
        entry.dissents.begin(), entry.dissents.end(),
        [&](const OperationEntry::Dissent& dissent) { return field.differs(*entry.proposed, *dissent.signature); });
    if (!differs) continue;
    std::vector<Opinion> opinions;
    for (int32_t rank : entry.submitted.ranks()) {
      add_opinion(opinions, field.describe(entry.signature_of(rank)), rank);
    }
    return mismatch(quoted(entry.name), opinions, field.advice, names);
  }
  return Status(SRT_MISMATCH, "ranks disagree about " + quoted(entry.name));
}

// Refuses a send if one of its two ranks has joined: a joined rank has only neutral elements to send, and no memory
// for a result.
Status validate_pair(const OperationEntry& entry, const RankNames& names) {
  RankBits silent = entry.participants();
  silent -= entry.submitted;
  if (silent.count() == 0) return {};
  return Status(SRT_MISMATCH, bounded(list_ranks(silent.ranks(), names) + " has joined and takes no part in " +
                                      quoted(entry.name) + "; send only to and from ranks that still have data"));
}

// Refuses an operation with a deadline once a rank has joined: ranks count the rounds of a name by themselves, and
// those of the rank that has joined would lag behind.
Status validate_rounds(const OperationEntry& entry, const RankNames& names) {
  return Status(SRT_MISMATCH, bounded(list_ranks(entry.set->joined.ranks(), names) + " has joined, and " +
                                      quoted(entry.name) + " has a deadline; join() and deadlines cannot be combined"));
}

Status validate_root(const OperationEntry& entry, const RankNames& names) {
  const int32_t root = entry.proposed->root;
  const auto& members = entry.set->members;
  if (!std::binary_search(members.begin(), members.end(), root)) {
    return Status(SRT_INVALID_ARGUMENT,
                  format("%s cannot be broadcast from rank %d, which is not a member of process set %d; "
                         "the root must be one of the ranks %s",
                         quoted(entry.name).c_str(), root, entry.set->number,
                         list_extents({members.begin(), members.end()}).c_str()));
  }
  if (entry.submitted.has(root)) return {};
  const std::string who = list_ranks(std::span(&root, 1), names);
  return Status(SRT_MISMATCH, bounded(who + " has joined and has nothing to send as the root of the broadcast " +
                                      quoted(entry.name) + "; broadcast from a rank that still has data"));
}

}  // namespace

std::string list_ranks(std::span<const int32_t> ranks, const RankNames& names) {
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < most_ranks_named; ++i) {
    if (i) text += ", ";
    text += shortened(names[static_cast<size_t>(ranks[i])], longest_rank_name);
  }
  if (ranks.size() > most_ranks_named) text += format(" and %zu more ranks", ranks.size() - most_ranks_named);
  return text;
}

std::string quoted(const std::string& name) { return "'" + shortened(name, longest_quoted) + "'"; }

std::string bounded(std::string text) { return shortened(text, longest_text); }

Status validate(const OperationEntry& entry, const RankNames& names) {
  if (!entry.dissents.empty()) return disagreement(entry, names);
  if (traits(entry.kind).is_of_a_pair) return validate_pair(entry, names);
  if (entry.proposed->deadline && entry.set->joined_count) return validate_rounds(entry, names);
  return traits(entry.kind).has_root && moves_tensors(entry.kind) ? validate_root(entry, names) : Status();
}

Status decided_differently(const Signature& decided, const Signature& own) {
  for (const Field& field : compared_fields) {
    if (!field.differs(decided, own)) continue;
    return Status(SRT_MISMATCH, bounded(quoted(own.name) + " was decided without this rank, which was late, with " +
                                        field.describe(decided) + ", and this rank has " + field.describe(own) + "; " +
                                        field.advice));
  }
  return Status(SRT_MISMATCH, quoted(own.name) + " was decided without this rank, which was late, and differs");
}

Status kinds_differ(std::span<OperationEntry* const> same_name, const RankNames& names) {
  std::vector<Opinion> opinions;
  for (const OperationEntry* entry : same_name) {
    opinions.push_back({format("the kind %s", kind_name(entry->kind)), entry->submitted.ranks()});
  }
  std::sort(opinions.begin(), opinions.end(),
            [](const Opinion& a, const Opinion& b) { return a.ranks.front() < b.ranks.front(); });
  return mismatch(quoted(same_name.front()->name), opinions, "every rank must call the same kind of operation", names);
}

Status peer_finished(const RankBits& ranks, const std::string& operation, const RankNames& names) {
  const std::vector<int32_t> finished = ranks.ranks();
  const char* verb = finished.size() == 1 ? " has" : " have";
  return Status(SRT_PEER_FINISHED,
                bounded(list_ranks(finished, names) + verb + " finished and cannot take part in " + operation));
}

Status peer_finished(const OperationEntry& entry, const RankNames& names) {
  RankBits ranks = entry.participants();
  ranks &= entry.set->finished;
  return peer_finished(ranks, quoted(entry.name), names);
}

}  // namespace sirtaki
