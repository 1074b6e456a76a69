#include "xla/call.h"

#include <algorithm>
#include <cstring>

#include "native/dtype_map.h"
#include "native/requests.h"

namespace sirtaki::bindings {
namespace {

// The attributes of a call, by name. A missing attribute reads as 0; the first missing one fails the call.
class Attributes {
 public:
  explicit Attributes(const XlaAttributes& attributes) : attributes_(attributes) {}

  int64_t integer(std::string_view name) { return scalar<int64_t>(name, XlaDataType::s64); }
  int32_t field(std::string_view name) { return static_cast<int32_t>(integer(name)); }
  double number(std::string_view name) { return scalar<double>(name, XlaDataType::f64); }

  std::string_view text(std::string_view name) {
    const auto* found = static_cast<const XlaText*>(find(name, XlaAttributeType::string));
    return found ? std::string_view(found->data, found->size) : std::string_view();
  }

  const CallStatus& status() const { return status_; }

 private:
  const void* find(std::string_view name, XlaAttributeType type) {
    for (int64_t i = 0; i < attributes_.size; ++i)
      if (std::string_view(attributes_.names[i]->data, attributes_.names[i]->size) == name &&
          attributes_.types[i] == type)
        return attributes_.attributes[i];
    return missing(name);
  }

  template <typename T>
  T scalar(std::string_view name, XlaDataType dtype) {
    T value{};
    const auto* found = static_cast<const XlaScalar*>(find(name, XlaAttributeType::scalar));
    if (found && found->dtype == dtype) std::memcpy(&value, found->value, sizeof value);
    else if (found) missing(name);
    return value;
  }

  std::nullptr_t missing(std::string_view name) {
    if (status_.is_ok())
      status_ = {SRT_INVALID_ARGUMENT, "a compiled program calls sirtaki without the attribute '" + std::string(name) +
                                           "', or with one of another type: was it compiled by another version?"};
    return nullptr;
  }

  const XlaAttributes& attributes_;
  CallStatus status_;
};

const srt_dtype* find_dtype(XlaDataType dtype) {
  static const DTypeMap known(std::initializer_list<std::pair<XlaDataType, const char*>>{
      {XlaDataType::boolean, "bool"},
      {XlaDataType::s8, "int8"},
      {XlaDataType::s16, "int16"},
      {XlaDataType::s32, "int32"},
      {XlaDataType::s64, "int64"},
      {XlaDataType::u8, "uint8"},
      {XlaDataType::u16, "uint16"},
      {XlaDataType::u32, "uint32"},
      {XlaDataType::u64, "uint64"},
      {XlaDataType::f16, "float16"},
      {XlaDataType::bf16, "bfloat16"},
      {XlaDataType::f32, "float32"},
      {XlaDataType::f64, "float64"},
      {XlaDataType::c64, "complex64"},
      {XlaDataType::c128, "complex128"},
      {XlaDataType::f8e4m3fn, "float8_e4m3fn"},
      {XlaDataType::f8e4m3fnuz, "float8_e4m3fnuz"},
      {XlaDataType::f8e5m2, "float8_e5m2"},
      {XlaDataType::f8e5m2fnuz, "float8_e5m2fnuz"},
      {XlaDataType::f8e8m0fnu, "float8_e8m0fnu"},
  });
  return known.find(static_cast<int32_t>(dtype));
}

// Returns the names, one per line, with the call's number, which distinguishes calls of the same name.
std::vector<std::string> split(std::string_view lines, int64_t number) {
  const std::string suffix = number ? " (" + std::to_string(number + 1) + ")" : "";
  std::vector<std::string> names;
  for (size_t start = 0; start <= lines.size();) {
    const size_t end = std::min(lines.find('\n', start), lines.size());
    names.push_back(std::string(lines.substr(start, end - start)) + suffix);
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

uint64_t bytes_of(const XlaBuffer& buffer, const srt_dtype& dtype) {
  auto bytes = static_cast<uint64_t>(dtype.bytes);
  for (int64_t i = 0; i < buffer.dimensions; ++i) bytes *= static_cast<uint64_t>(buffer.shape[i]);
  return bytes;
}

}  // namespace

CallStatus XlaCall::read(const XlaCallFrame& frame, XlaCall& out) {
  Attributes attributes(frame.attributes);
  srt_request like = new_request(attributes.field("kind"));
  like.reduce_op = attributes.field("reduce_op");
  like.root = attributes.field("root");
  like.process_set = out.process_set_ = attributes.field("process_set");
  like.device = -1;
  like.prescale = attributes.number("prescale");
  like.postscale = attributes.number("postscale");
  out.members_ = attributes.integer("members");
  out.ends_step_ = attributes.integer("ends_step");
  const int64_t number = attributes.integer("number"), count = attributes.integer("count");
  const std::string_view names = attributes.text("names");
  if (!attributes.status().is_ok()) return attributes.status();
  if (number < 0)
    return {SRT_UNSUPPORTED, "'" + std::string(names) +
                                 "': this version of JAX does not tell when it has lowered a program, so calls of one "
                                 "name cannot be told apart; use a version that docs/guide/jax.md names"};
  out.names_ = split(names, number);
  const auto tensors = static_cast<size_t>(count);
  if (count < 0 || frame.operands.size < count || frame.results.size < count || out.names_.size() < tensors)
    return {SRT_INVALID_ARGUMENT, "a compiled program calls sirtaki with fewer buffers than tensors"};
  out.shapes_.resize(tensors);
  CallStatus status;
  for (size_t i = 0; i < tensors && status.is_ok(); ++i)
    status = out.add(*static_cast<const XlaBuffer*>(frame.operands.buffers[i]),
                     *static_cast<const XlaBuffer*>(frame.results.buffers[i]), like, i);
  return status;
}

CallStatus XlaCall::add(const XlaBuffer& operand, const XlaBuffer& result, const srt_request& like, size_t index) {
  const srt_dtype* dtype = find_dtype(operand.dtype);
  if (!dtype)
    return {SRT_UNSUPPORTED, "'" + names_[index] + "': sirtaki cannot exchange elements of XLA's type " +
                                 std::to_string(static_cast<int32_t>(operand.dtype)) +
                                 "; convert the array first, for example to float32"};
  shapes_[index] = requested_shape(like.kind, operand, members_);
  results_.push_back({result.data, bytes_of(result, *dtype)});
  srt_request request = like;
  request.dtype = dtype->code;
  request.name = names_[index].c_str();
  request.dimensions = static_cast<int32_t>(shapes_[index].size());
  request.shape = shapes_[index].data();
  request.input = reinterpret_cast<uintptr_t>(operand.data);
  request.output = reinterpret_cast<uintptr_t>(result.data);
  requests_.push_back(request);
  return {};
}

}  // namespace sirtaki::bindings
