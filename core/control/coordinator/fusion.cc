#include "control/coordinator/fusion.h"

#include <algorithm>

#include "control/messages/response_cache.h"

namespace sirtaki {
namespace {

struct OpenPlan {
  const OperationEntry* first;
  size_t index;
  int64_t bytes;
};

// Returns whether two sends are between the same two ranks. Such sends are fused, in both directions.
bool are_of_one_pair(const Signature& x, const Signature& y) {
  return std::minmax(x.root, x.destination) == std::minmax(y.root, y.destination);
}

// Returns the bytes that a plan moves for an entry; for a ragged kind those of the whole result.
int64_t bytes_of(const OperationEntry& entry) {
  const Signature& proposed = *entry.proposed;
  if (!is_ragged(entry.kind)) return proposed.bytes();
  int64_t rows = 0;
  for (int64_t count : entry.rows)
    if (__builtin_add_overflow(rows, count, &rows)) return never;
  return __builtin_mul_overflow(rows, proposed.row_bytes(), &rows) ? never : rows;
}

bool is_untouched(const OperationEntry& entry) { return entry.absences == entry.submissions; }

bool fits_with(const OperationEntry& a, const OperationEntry& b) {
  const Signature& x = *a.proposed;
  const Signature& y = *b.proposed;
  if (a.set != b.set || a.kind != b.kind || !same_kind_of_device(x, y) || a.submissions != b.submissions ||
      is_untouched(a) != is_untouched(b)) {
    return false;
  }
  if (traits(a.kind).is_of_a_pair) return are_of_one_pair(x, y);
  if (x.root != y.root) return false;  // checked even for kinds without a root: members compare it for every kind
  if (!reduces(a.kind)) return true;
  return x.dtype == y.dtype && x.reduce_op == y.reduce_op && x.prescale == y.prescale && x.postscale == y.postscale &&
         x.wire_format == y.wire_format;
}

bool goes_before(const ReadyEntry& a, const ReadyEntry& b) {
  if (a.entry->priority != b.entry->priority) return a.entry->priority > b.entry->priority;
  if (const int order = a.entry->name.compare(b.entry->name)) return order < 0;
  if (a.entry->set != b.entry->set) return a.entry->set->number < b.entry->set->number;
  return a.entry->kind < b.entry->kind;
}

// Returns the plan to which an entry is added: an open plan with room for it, or a new one.
size_t choose_plan(const OperationEntry& entry, int64_t threshold, std::vector<OpenPlan>& open,
                   std::vector<DecidedPlan>& plans) {
  const int64_t bytes = moves_tensors(entry.kind) ? bytes_of(entry) : 0;
  // Operations with a deadline have contributors of their own.
  const bool may_share = moves_tensors(entry.kind) && bytes < threshold && !entry.proposed->deadline;
  const auto found = std::find_if(open.begin(), open.end(),
                                  [&](const OpenPlan& plan) { return may_share && fits_with(*plan.first, entry); });
  if (found != open.end() && found->bytes <= threshold - bytes) {
    found->bytes += bytes;
    return found->index;
  }
  const OpenPlan opened{&entry, plans.size(), bytes};
  if (found != open.end()) {
    *found = opened;
  } else if (may_share) {
    open.push_back(opened);
  }
  DecidedPlan& plan = plans.emplace_back();
  plan.process_set = entry.set->number;
  plan.contributors = entry.submissions;
  plan.untouched = is_untouched(entry);
  if (entry.proposed->deadline) plan.absentees = entry.absentees().ranks();
  return opened.index;
}

}  // namespace

void fuse(std::vector<ReadyEntry>& ready, int64_t threshold, std::vector<DecidedPlan>& plans) {
  if (ready.size() > 1) std::sort(ready.begin(), ready.end(), goes_before);
  std::vector<OpenPlan> open;
  for (const ReadyEntry& next : ready) {
    plans[choose_plan(*next.entry, threshold, open, plans)].items.push_back(next.item);
  }
}

}  // namespace sirtaki
