#include "xla/call.h"

#include <cstring>

#include "base/dtype.h"
#include "base/text.h"

namespace sirtaki {
namespace {

// The attributes of a call, by name.
class Attributes {
 public:
  explicit Attributes(const XlaAttributes& attributes) : attributes_(attributes) {}

  Status integer(std::string_view name, int64_t& out) const { return scalar(name, XlaDataType::s64, out); }
  Status number(std::string_view name, double& out) const { return scalar(name, XlaDataType::f64, out); }

  // Reads an integer of 32 bits, the size of a request's fields.
  Status field(std::string_view name, int32_t& out) const {
    int64_t value = 0;
    SIRTAKI_TRY(integer(name, value));
    out = static_cast<int32_t>(value);
    return Status::ok();
  }

  Status text(std::string_view name, std::string_view& out) const {
    const void* found = find(name, XlaAttributeType::string);
    if (!found) return missing(name);
    const auto* text = static_cast<const XlaText*>(found);
    out = {text->data, text->size};
    return Status::ok();
  }

 private:
  static Status missing(std::string_view name) {
    return {SRT_INVALID_ARGUMENT, format("a compiled program calls sirtaki without the attribute '%s', or with one of "
                                         "another type: was it compiled by another version?",
                                         std::string(name).c_str())};
  }

  const void* find(std::string_view name, XlaAttributeType type) const {
    for (int64_t i = 0; i < attributes_.size; ++i)
      if (std::string_view(attributes_.names[i]->data, attributes_.names[i]->size) == name)
        return attributes_.types[i] == type ? attributes_.attributes[i] : nullptr;
    return nullptr;
  }

  template <typename T>
  Status scalar(std::string_view name, XlaDataType dtype, T& out) const {
    const auto* found = static_cast<const XlaScalar*>(find(name, XlaAttributeType::scalar));
    if (!found || found->dtype != dtype) return missing(name);
    std::memcpy(&out, found->value, sizeof out);
    return Status::ok();
  }

  const XlaAttributes& attributes_;
};

bool find_dtype(XlaDataType dtype, DType& out) {
  switch (dtype) {
    case XlaDataType::boolean: out = DType::boolean; return true;
    case XlaDataType::s8: out = DType::int8; return true;
    case XlaDataType::s16: out = DType::int16; return true;
    case XlaDataType::s32: out = DType::int32; return true;
    case XlaDataType::s64: out = DType::int64; return true;
    case XlaDataType::u8: out = DType::uint8; return true;
    case XlaDataType::u16: out = DType::uint16; return true;
    case XlaDataType::u32: out = DType::uint32; return true;
    case XlaDataType::u64: out = DType::uint64; return true;
    case XlaDataType::f16: out = DType::float16; return true;
    case XlaDataType::bf16: out = DType::bfloat16; return true;
    case XlaDataType::f32: out = DType::float32; return true;
    case XlaDataType::f64: out = DType::float64; return true;
    case XlaDataType::c64: out = DType::complex64; return true;
    case XlaDataType::c128: out = DType::complex128; return true;
    case XlaDataType::f8e4m3fn: out = DType::float8_e4m3fn; return true;
    case XlaDataType::f8e4m3fnuz: out = DType::float8_e4m3fnuz; return true;
    case XlaDataType::f8e5m2: out = DType::float8_e5m2; return true;
    case XlaDataType::f8e5m2fnuz: out = DType::float8_e5m2fnuz; return true;
    case XlaDataType::f8e8m0fnu: out = DType::float8_e8m0fnu; return true;
    default: return false;
  }
}

// Returns the name with the call's number, which distinguishes calls of the same name.
std::string numbered(std::string_view name, int64_t number) {
  return number ? format("%.*s (%lld)", static_cast<int>(name.size()), name.data(), static_cast<long long>(number + 1))
                : std::string(name);
}

std::vector<std::string> split(std::string_view lines, int64_t number) {
  std::vector<std::string> names;
  for (size_t start = 0; start <= lines.size();) {
    const size_t end = std::min(lines.find('\n', start), lines.size());
    names.push_back(numbered(lines.substr(start, end - start), number));
    start = end + 1;
  }
  return names;
}

// Compiled shapes are static, so a fixed leading dimension is prepended where the core allows the first one to differ
// between ranks: 1 for all-gather, `members` for all-to-all.
std::vector<int64_t> requested_shape(int32_t kind, const XlaBuffer& operand, int64_t members) {
  std::vector<int64_t> shape(operand.shape, operand.shape + operand.dimensions);
  if (kind == SRT_ALLGATHER) shape.insert(shape.begin(), 1);
  if (kind == SRT_ALLTOALL && !shape.empty() && members) {
    shape.front() /= members;
    shape.insert(shape.begin(), members);
  }
  return shape;
}

uint64_t bytes_of(const XlaBuffer& buffer, DType dtype) {
  uint64_t bytes = dtype_bytes(dtype);
  for (int64_t i = 0; i < buffer.dimensions; ++i) bytes *= static_cast<uint64_t>(buffer.shape[i]);
  return bytes;
}

}  // namespace

Status XlaCall::read(const XlaCallFrame& frame, XlaCall& out) {
  const Attributes attributes(frame.attributes);
  srt_request like{};
  like.struct_size = sizeof like;
  like.flags = SRT_REQUEST_QUEUE_SAME_NAME;  // in a loop, the next call may start before the last one's name is free
  int64_t count = 0, number = 0;
  std::string_view names;
  SIRTAKI_TRY(attributes.field("kind", like.kind));
  SIRTAKI_TRY(attributes.field("reduce_op", like.reduce_op));
  SIRTAKI_TRY(attributes.field("root", like.root));
  SIRTAKI_TRY(attributes.field("process_set", like.process_set));
  SIRTAKI_TRY(attributes.field("device", like.device));
  SIRTAKI_TRY(attributes.number("prescale", like.prescale));
  SIRTAKI_TRY(attributes.number("postscale", like.postscale));
  SIRTAKI_TRY(attributes.integer("members", out.members_));
  SIRTAKI_TRY(attributes.integer("number", number));
  SIRTAKI_TRY(attributes.integer("count", count));
  SIRTAKI_TRY(attributes.text("names", names));
  if (number < 0)
    return {SRT_UNSUPPORTED,
            format("'%.*s': this version of JAX does not tell when it has lowered a program, so calls of one name "
                   "cannot be told apart; use a version that docs/jax.md names",
                   static_cast<int>(names.size()), names.data())};
  out.process_set_ = like.process_set;
  out.names_ = split(names, number);
  const auto tensors = static_cast<size_t>(count);
  if (count < 0 || frame.operands.size < count || frame.results.size < count || out.names_.size() < tensors)
    return {SRT_INVALID_ARGUMENT, "a compiled program calls sirtaki with fewer buffers than tensors"};
  out.shapes_.resize(tensors);
  for (size_t i = 0; i < tensors; ++i)
    SIRTAKI_TRY(out.add(*static_cast<const XlaBuffer*>(frame.operands.buffers[i]),
                        *static_cast<const XlaBuffer*>(frame.results.buffers[i]), like, i));
  return Status::ok();
}

Status XlaCall::add(const XlaBuffer& operand, const XlaBuffer& result, const srt_request& like, size_t place) {
  DType dtype;
  if (!find_dtype(operand.dtype, dtype))
    return {SRT_UNSUPPORTED, format("'%s': sirtaki cannot exchange elements of XLA's type %d; convert the array first, "
                                    "for example to float32",
                                    names_[place].c_str(), static_cast<int>(operand.dtype))};
  shapes_[place] = requested_shape(like.kind, operand, members_);
  results_.push_back({result.data, bytes_of(result, dtype)});
  srt_request request = like;
  request.dtype = static_cast<int32_t>(dtype);
  request.name = names_[place].c_str();
  request.dimensions = static_cast<int32_t>(shapes_[place].size());
  request.shape = shapes_[place].data();
  request.input = reinterpret_cast<uintptr_t>(operand.data);
  request.output = reinterpret_cast<uintptr_t>(result.data);
  requests_.push_back(request);
  return Status::ok();
}

}  // namespace sirtaki
