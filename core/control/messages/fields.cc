#include "control/messages/fields.h"

#include <algorithm>
#include <cmath>

namespace sirtaki {
namespace {

constexpr size_t most_splits = 1 << 20;

// Returns whether elements() and bytes() cannot overflow.
bool has_sane_shape(const Signature& signature) {
  if (changes_process_sets(signature.kind)) return true;
  if (signature.shape.size() > most_dimensions) return false;
  if (cuts_rows(signature.kind) && signature.shape.empty()) return false;
  int64_t bytes = static_cast<int64_t>(dtype_bytes(signature.dtype));
  for (int64_t extent : signature.shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes)) return false;
  }
  return true;
}

// Returns whether the splits add up to at most the rows of the tensor.
bool has_sane_splits(const Signature& signature) {
  if (signature.splits.size() > most_splits) return false;
  if (!traits(signature.kind).has_splits) return true;
  int64_t left = signature.shape.empty() ? 0 : signature.shape.front();
  for (int64_t rows : signature.splits) {
    if (rows < 0 || rows > left) return false;
    left -= rows;
  }
  return true;
}

// Returns whether the reduction has kernels.
bool has_sane_reduction(const Signature& signature) {
  if (!reduces(signature.kind)) return true;
  if (!reduces_with(signature.kind, signature.reduce_op)) return false;
  const srt_dtype* dtype = dtype_entry(static_cast<int>(signature.dtype));
  return (dtype->reduce_ops >> static_cast<int>(signature.reduce_op) & 1) != 0;
}

bool has_sane_wire_format(const Signature& signature) {
  return signature.wire_format == WireFormat::exact || (signature.may_be_encoded() && signature.device < 0);
}

bool has_sane_deadline(const Signature& signature) {
  if (!signature.deadline) return true;
  const Deadline& deadline = *signature.deadline;
  return signature.may_have_deadline() && deadline.after >= 0 && deadline.quorum >= 1 && deadline.round >= 1 &&
         signature.name.size() > round_suffix(deadline.round).size() &&
         signature.name.ends_with(round_suffix(deadline.round));
}

}  // namespace

bool is_sane(const Signature& signature) {
  return !signature.name.empty() && std::isfinite(signature.prescale) && std::isfinite(signature.postscale) &&
         (signature.group_id == 0) == (signature.group_size == 0) && signature.group_size >= 0 &&
         has_sane_shape(signature) && has_sane_splits(signature) && has_sane_reduction(signature) &&
         has_sane_wire_format(signature) && has_sane_deadline(signature);
}

}  // namespace sirtaki
