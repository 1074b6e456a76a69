#include "control/wire.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"

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

// Returns whether the splits have at most as many rows as the tensor.
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

// Returns whether there are kernels for the reduction.
bool has_sane_reduction(const Signature& signature) {
  if (!reduces(signature.kind)) return true;
  if (!reduces_with(signature.kind, signature.reduce_op)) return false;
  const srt_dtype* dtype = dtype_entry(static_cast<int>(signature.dtype));
  return (dtype->reduce_ops >> static_cast<int>(signature.reduce_op) & 1) != 0;
}

}  // namespace

bool is_sane(const Signature& signature) {
  return !signature.name.empty() && std::isfinite(signature.prescale) && std::isfinite(signature.postscale) &&
         (signature.group_id == 0) == (signature.group_size == 0) && signature.group_size >= 0 &&
         has_sane_shape(signature) && has_sane_splits(signature) && has_sane_reduction(signature);
}

void put_signature(Writer& writer, const Signature& signature) {
  writer.put(signature.kind);
  writer.put(signature.dtype);
  writer.put(signature.reduce_op);
  writer.put(signature.process_set);
  writer.put(signature.root);
  writer.put(signature.destination);
  writer.put(signature.device);
  writer.put(signature.priority);
  writer.put(signature.group_size);
  writer.put(signature.group_id);
  writer.put(signature.layout);
  writer.put(signature.prescale);
  writer.put(signature.postscale);
  writer.put_text(signature.name);
  put_list(writer, signature.shape);
  put_list(writer, signature.splits);
}

std::string get_name(Reader& reader) {
  std::string name = reader.get_text(longest_name);
  if (find_unprintable(name) != std::string::npos) reader.fail();
  return name;
}

std::string get_printable(Reader& reader, size_t limit) { return printable(reader.get_text(limit), limit); }

SignaturePtr get_signature(Reader& reader) {
  auto signature = std::make_shared<Signature>();
  signature->kind = reader.get_enum(last_requested_kind);
  signature->dtype = reader.get_enum(last_dtype);
  signature->reduce_op = reader.get_enum(last_reduce_op);
  signature->process_set = reader.get<int32_t>();
  signature->root = reader.get<int32_t>();
  signature->destination = reader.get<int32_t>();
  signature->device = reader.get<int32_t>();
  signature->priority = reader.get<int32_t>();
  signature->group_size = reader.get<int32_t>();
  signature->group_id = reader.get<int64_t>();
  signature->layout = reader.get<uint64_t>();
  signature->prescale = reader.get<double>();
  signature->postscale = reader.get<double>();
  signature->name = get_name(reader);
  signature->shape = reader.get_all<int64_t>();
  signature->splits = reader.get_all<int64_t>();
  if (!is_sane(*signature)) reader.fail();
  return signature;
}

void put_rank_report(Writer& writer, const StalledRankReport& wait_report) {
  writer.put(wait_report.rank);
  writer.put<uint8_t>(wait_report.answers);
  writer.put(wait_report.leader);
  writer.put_text(wait_report.waits_for);
  put_each(writer, wait_report.frames, [&](const StackFrame& frame) {
    writer.put_text(frame.function);
    writer.put_text(frame.file);
    writer.put(frame.line);
  });
}

void get_rank_report(Reader& reader, StalledRankReport& wait_report) {
  wait_report.rank = reader.get<int32_t>();
  wait_report.answers = reader.get<uint8_t>() != 0;
  wait_report.leader = reader.get<int32_t>();
  wait_report.waits_for = get_name(reader);
  get_each(reader, wait_report.frames, [&](StackFrame& frame) {
    frame.function = get_printable(reader, longest_frame_text);
    frame.file = get_printable(reader, longest_frame_text);
    frame.line = reader.get<int32_t>();
  });
  if (wait_report.frames.size() > most_frames) reader.fail();
}

}  // namespace sirtaki
