#include "control/messages/response_cache.h"

#include <algorithm>

namespace sirtaki {
namespace {

bool same_shape(const Signature& a, const Signature& b) {
  if (!is_ragged(a.kind)) return a.shape == b.shape;
  if (a.shape.empty() || b.shape.empty()) return a.shape == b.shape;
  return std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1, b.shape.end());
}

}  // namespace

std::span<const int64_t> rows_of(const Signature& signature) {
  static constexpr int64_t one = 1;
  if (traits(signature.kind).has_splits) return signature.splits;
  return signature.shape.empty() ? std::span(&one, 1) : std::span(signature.shape).first(1);
}

std::span<const int64_t> rows_at(const Signature& signature, const std::vector<int64_t>& rows, size_t members,
                                 size_t position) {
  if (!is_ragged(signature.kind)) return {};
  const size_t each = row_counts_each(signature.kind, members);
  if (rows.size() < (position + 1) * each) return {};
  return std::span(rows).subspan(position * each, each);
}

bool agree(const Signature& a, const Signature& b) {
  return a.dtype == b.dtype && same_shape(a, b) && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.destination == b.destination && a.prescale == b.prescale && a.postscale == b.postscale &&
         a.wire_format == b.wire_format && same_kind_of_device(a, b) && a.layout == b.layout &&
         a.group_id == b.group_id && a.group_size == b.group_size && a.splits.size() == b.splits.size() &&
         a.deadline == b.deadline;
}

bool answers(const Signature& cached, const std::vector<int64_t>& rows, const Signature& request, size_t members,
             size_t position) {
  if (&cached == &request) return true;
  if (!agree(cached, request)) return false;
  if (!is_ragged(cached.kind)) return true;
  const auto known = rows_at(cached, rows, members, position), wanted = rows_of(request);
  return std::equal(known.begin(), known.end(), wanted.begin(), wanted.end());
}

}  // namespace sirtaki
