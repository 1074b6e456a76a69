#include "context/submission.h"

#include <cmath>
#include <cstring>

#include "base/log.h"

namespace sirtaki {
namespace {

Status refuse(const std::string& name, const std::string& reason, srt_status code = SRT_INVALID_ARGUMENT) {
  return {code, format("'%s': %s", printable(name, 200).c_str(), reason.c_str())};
}

// The length of the UTF-8 sequence at `at`, 0 if it is malformed or a control character.
size_t utf8_length(std::string_view text, size_t at) {
  const auto byte = static_cast<uint8_t>(text[at]);
  if (byte < 0x80) return byte >= 0x20 && byte != 0x7f ? 1 : 0;
  const size_t length = byte >= 0xf0 && byte < 0xf5   ? 4
                        : byte >= 0xe0 && byte < 0xf0 ? 3
                        : byte >= 0xc2 && byte < 0xe0 ? 2
                                                      : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((static_cast<uint8_t>(text[at + i]) & 0xc0) != 0x80) return 0;
  return length;
}

Status check_name(std::string_view name) {
  if (name.empty() || name.size() > longest_name)
    return {SRT_INVALID_ARGUMENT,
            format("a tensor's name must have 1 to %zu bytes, this one has %zu", longest_name, name.size())};
  for (size_t at = 0; at < name.size();) {
    const size_t length = utf8_length(name, at);
    if (length == 0)
      return {SRT_INVALID_ARGUMENT,
              format("the tensor name '%s' has a control character, or bytes that are not UTF-8, at byte %zu",
                     printable(name, 100).c_str(), at)};
    at += length;
  }
  return Status::ok();
}

Status check_shape(const srt_request& request, Signature& signature) {
  if (request.dimensions < 0 || request.dimensions > static_cast<int32_t>(most_dimensions))
    return refuse(signature.name, format("a tensor may have up to %zu dimensions, this one has %d", most_dimensions,
                                         request.dimensions));
  if (request.dimensions > 0 && !request.shape) return refuse(signature.name, "the shape is missing");
  signature.shape.assign(request.shape, request.shape + request.dimensions);
  int64_t bytes = static_cast<int64_t>(dtype_bytes(signature.dtype));
  for (int64_t extent : signature.shape) {
    if (extent < 0) return refuse(signature.name, "a dimension is negative");
    if (extent > 0 && __builtin_mul_overflow(bytes, extent, &bytes))
      return refuse(signature.name, "the tensor is larger than memory can be");
  }
  return Status::ok();
}

Status check_reduction(const srt_request& request, const Signature& signature) {
  if (request.reduce_op < 0 || request.reduce_op > static_cast<int32_t>(last_reduce_op))
    return refuse(signature.name, format("there is no reduce op %d", request.reduce_op));
  if (!dtype_entry(request.dtype)->reducible)
    return refuse(signature.name,
                  format("all-reduce cannot add elements of dtype %s; convert the tensor first, for example to float32",
                         dtype_name(signature.dtype)),
                  SRT_UNSUPPORTED);
  for (const auto& [what, value] : {std::pair{"prescale", request.prescale}, std::pair{"postscale", request.postscale}})
    if (!std::isfinite(value))
      return refuse(signature.name, format("the %s factor is %g; it must be a finite number", what, value));
  return Status::ok();
}

Status check_kind(const srt_request& request, int32_t world_size, const Signature& signature) {
  if (request.process_set != world_set)
    return refuse(signature.name, format("there is no process set %d", request.process_set));
  if (signature.kind == Kind::allreduce) SIRTAKI_TRY(check_reduction(request, signature));
  if (signature.kind == Kind::broadcast && (request.root < 0 || request.root >= world_size))
    return refuse(signature.name, format("the root rank %d does not exist; the ranks of this job are 0 to %d",
                                         request.root, world_size - 1));
  if (signature.kind == Kind::allgather && signature.shape.empty())
    return refuse(signature.name,
                  "all-gather joins tensors along their first dimension, and a zero-dimensional tensor has none; "
                  "reshape it to (1,)");
  if ((request.group_id != 0) != (request.group_size > 0) || request.group_id < 0 || request.group_size < 0)
    return refuse(signature.name, "group_id and group_size go together, and are positive");
  const bool moves = signature.kind != Kind::barrier && signature.bytes() > 0;
  const bool gives_nothing = signature.kind == Kind::allreduce && request.flags & SRT_REQUEST_ABSENT;
  if (moves && !request.input && !gives_nothing) return refuse(signature.name, "the input pointer is null");
  if (moves && signature.kind != Kind::allgather && !request.output)
    return refuse(signature.name, "the output pointer is null");
  if (request.input != request.output && request.output &&
      request.input < request.output + static_cast<uintptr_t>(signature.bytes()) &&
      request.output < request.input + static_cast<uintptr_t>(signature.bytes()))
    return refuse(signature.name, "input and output overlap without being the same memory");
  return Status::ok();
}

}  // namespace

Status make_entry(const srt_request& request, int32_t world_size, HandleTable& handles, Entry& out) {
  if (request.struct_size < sizeof(srt_request))
    return {SRT_INVALID_ARGUMENT, "srt_request.struct_size is too small: is another version's header in use?"};
  if (request.kind < 0 || request.kind > static_cast<int32_t>(Kind::barrier))
    return {SRT_INVALID_ARGUMENT, format("there is no operation kind %d", request.kind)};
  auto signature = std::make_shared<Signature>();
  signature->kind = static_cast<Kind>(request.kind);
  signature->process_set = request.process_set;
  if (request.name) {
    SIRTAKI_TRY(check_name(request.name));
    signature->name = request.name;
  } else {
    signature->name = format("%s.noname.%lld", kind_name(signature->kind),
                             static_cast<long long>(handles.next_number(request.process_set, signature->kind)));
  }
  const srt_dtype* dtype = dtype_entry(request.dtype);
  if (!dtype) return refuse(signature->name, format("there is no dtype %d", request.dtype), SRT_UNSUPPORTED);
  signature->dtype = static_cast<DType>(request.dtype);
  SIRTAKI_TRY(check_shape(request, *signature));
  SIRTAKI_TRY(check_kind(request, world_size, *signature));
  if (signature->kind == Kind::allreduce) {
    signature->reduce_op = static_cast<ReduceOp>(request.reduce_op);
    signature->prescale = request.prescale;
    signature->postscale = request.postscale;
  }
  if (signature->kind == Kind::broadcast) signature->root = request.root;
  signature->device = request.device;
  signature->priority = request.priority;
  signature->group_size = request.group_size;
  signature->group_id = request.group_id;
  signature->layout = request.layout;
  out.signature = std::move(signature);
  out.input = request.input;
  out.output = request.output;
  out.absent = request.flags & SRT_REQUEST_ABSENT;
  out.on_complete = request.on_complete;
  out.allocate = request.allocate;
  out.user = request.user;
  return Status::ok();
}

}  // namespace sirtaki
