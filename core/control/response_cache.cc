#include "control/response_cache.h"

#include <algorithm>

namespace sirtaki {
namespace {

bool same_shape(const Signature& a, const Signature& b) {
  if (!is_ragged(a.kind)) return a.shape == b.shape;
  if (a.shape.empty() || b.shape.empty()) return a.shape == b.shape;
  return std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1, b.shape.end());
}

}  // namespace

bool agree(const Signature& a, const Signature& b) {
  return a.dtype == b.dtype && same_shape(a, b) && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.prescale == b.prescale && a.postscale == b.postscale && same_kind_of_device(a, b) && a.layout == b.layout &&
         a.group_id == b.group_id && a.group_size == b.group_size && a.splits.size() == b.splits.size();
}

bool answers(const Signature& cached, const std::vector<int64_t>& first_dimensions, const Signature& request,
             size_t position) {
  if (&cached == &request) return true;
  if (!agree(cached, request) || cached.splits != request.splits) return false;
  return !is_ragged(cached.kind) ||
         (position < first_dimensions.size() && first_dimensions[position] == first_dimension(request));
}

}  // namespace sirtaki
