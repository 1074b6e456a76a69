// The part of XLA's foreign function interface that is used, by which compiled programs call native code. The
// declarations are our own, so that XLA is not needed to build; tests/adapters compares them with the header that
// jaxlib ships.
//
// Structs only grow at the end, and existing fields have not changed since jaxlib 0.5. In the table of functions,
// only those declared with a signature here have kept their position.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/call_status.h"

namespace sirtaki::bindings {

struct XlaError;  // owned by XLA once it is passed to it
struct XlaFuture;
struct XlaExecutionContext;

struct XlaExtension {
  size_t struct_size;
  int32_t type;
  XlaExtension* next;
};
constexpr int32_t xla_metadata_extension = 1;

// The beginning of most structs.
struct XlaStruct {
  size_t struct_size;
  XlaExtension* extensions;
};

struct XlaApiVersion : XlaStruct {
  int32_t major_version, minor_version;
};

enum class XlaDataType : int32_t {
  // clang-format off
  invalid = 0, boolean = 1, s8 = 2, s16 = 3, s32 = 4, s64 = 5, u8 = 6, u16 = 7, u32 = 8, u64 = 9, f16 = 10, f32 = 11,
  f64 = 12, c64 = 15, bf16 = 16, c128 = 18, f8e5m2 = 19, f8e4m3fn = 20, f8e5m2fnuz = 24, f8e4m3fnuz = 25,
  f8e8m0fnu = 33,
  // clang-format on
};

struct XlaBuffer : XlaStruct {
  XlaDataType dtype;
  void* data;
  int64_t dimensions;
  int64_t* shape;
};

enum class XlaAttributeType : int32_t { array = 1, dictionary = 2, scalar = 3, string = 4 };

struct XlaText {
  const char* data;
  size_t size;
};

struct XlaScalar {
  XlaDataType dtype;
  void* value;
};

enum class XlaStage : int32_t { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

struct XlaBuffers : XlaStruct {  // all of a call's operands, or all of its results
  int64_t size;
  int32_t* types;
  void** buffers;  // XlaBuffer*
};

struct XlaAttributes : XlaStruct {
  int64_t size;
  XlaAttributeType* types;
  XlaText** names;
  void** attributes;  // XlaScalar* or XlaText*, as the type says
};

struct XlaApi;

struct XlaCallFrame : XlaStruct {
  const XlaApi* api;
  XlaExecutionContext* context;
  XlaStage stage;
  XlaBuffers operands, results;
  XlaAttributes attributes;
  XlaFuture* future;  // set by the handler if the results come later
};

using XlaHandler = XlaError*(XlaCallFrame*);

struct XlaMetadata {
  size_t struct_size;
  XlaApiVersion api_version;
  uint32_t traits;
};

struct XlaMetadataExtension {
  XlaExtension base;
  XlaMetadata* metadata;
};

struct XlaErrorCreate : XlaStruct {
  const char* message;
  AbslCode code;
};

struct XlaFutureCreate : XlaStruct {
  XlaFuture* future;
};

struct XlaFutureSetAvailable : XlaStruct {
  XlaFuture* future;
};

struct XlaFutureSetError : XlaStruct {
  XlaFuture* future;
  XlaError* error;
};

struct XlaStreamGet : XlaStruct {
  XlaExecutionContext* context;
  void* stream;
};

struct XlaApi : XlaStruct {
  XlaApiVersion api_version;
  const void* internal_api;
  XlaError* (*create_error)(XlaErrorCreate*);
  void* not_used[3];
  XlaError* (*get_stream)(XlaStreamGet*);
  void* not_used_either[8];
  XlaError* (*create_future)(XlaFutureCreate*);
  XlaError* (*set_available)(XlaFutureSetAvailable*);
  XlaError* (*set_error)(XlaFutureSetError*);
};

}  // namespace sirtaki::bindings
