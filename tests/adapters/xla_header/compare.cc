// Compiles if our declarations of XLA's foreign function interface match the header that jaxlib ships.
#include <cstdio>

#include "xla/ffi.h"
#include "xla/ffi/api/c_api.h"

using namespace sirtaki::bindings;

// XLA's structs may be longer than ours, never shorter; members have the same offset and the same size.
#define MEMBER(Ours, ours, Theirs, theirs)                                               \
  static_assert(offsetof(Ours, ours) == offsetof(Theirs, theirs), #Theirs "::" #theirs); \
  static_assert(sizeof(Ours::ours) == sizeof(Theirs::theirs), "size of " #Theirs "::" #theirs)
#define VALUE(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #theirs)
#define DTYPE(ours, theirs) VALUE(XlaDataType::ours, XLA_FFI_DataType_##theirs)

MEMBER(XlaExtension, type, XLA_FFI_Extension_Base, type);
MEMBER(XlaExtension, next, XLA_FFI_Extension_Base, next);
VALUE(xla_metadata_extension, XLA_FFI_Extension_Metadata);
MEMBER(XlaApiVersion, major_version, XLA_FFI_Api_Version, major_version);
MEMBER(XlaApiVersion, minor_version, XLA_FFI_Api_Version, minor_version);
MEMBER(XlaBuffer, dtype, XLA_FFI_Buffer, dtype);
MEMBER(XlaBuffer, data, XLA_FFI_Buffer, data);
MEMBER(XlaBuffer, dimensions, XLA_FFI_Buffer, rank);
MEMBER(XlaBuffer, shape, XLA_FFI_Buffer, dims);
MEMBER(XlaText, data, XLA_FFI_ByteSpan, ptr);
MEMBER(XlaText, size, XLA_FFI_ByteSpan, len);
MEMBER(XlaScalar, dtype, XLA_FFI_Scalar, dtype);
MEMBER(XlaScalar, value, XLA_FFI_Scalar, value);
MEMBER(XlaBuffers, size, XLA_FFI_Args, size);
MEMBER(XlaBuffers, buffers, XLA_FFI_Args, args);
MEMBER(XlaBuffers, size, XLA_FFI_Rets, size);
MEMBER(XlaBuffers, buffers, XLA_FFI_Rets, rets);
static_assert(sizeof(XlaBuffers) == sizeof(XLA_FFI_Args) && sizeof(XlaBuffers) == sizeof(XLA_FFI_Rets));
MEMBER(XlaAttributes, size, XLA_FFI_Attrs, size);
MEMBER(XlaAttributes, types, XLA_FFI_Attrs, types);
MEMBER(XlaAttributes, names, XLA_FFI_Attrs, names);
MEMBER(XlaAttributes, attributes, XLA_FFI_Attrs, attrs);
MEMBER(XlaCallFrame, extensions, XLA_FFI_CallFrame, extension_start);
MEMBER(XlaCallFrame, api, XLA_FFI_CallFrame, api);
MEMBER(XlaCallFrame, context, XLA_FFI_CallFrame, ctx);
MEMBER(XlaCallFrame, stage, XLA_FFI_CallFrame, stage);
MEMBER(XlaCallFrame, operands, XLA_FFI_CallFrame, args);
MEMBER(XlaCallFrame, results, XLA_FFI_CallFrame, rets);
MEMBER(XlaCallFrame, attributes, XLA_FFI_CallFrame, attrs);
MEMBER(XlaCallFrame, future, XLA_FFI_CallFrame, future);
MEMBER(XlaMetadata, api_version, XLA_FFI_Metadata, api_version);
MEMBER(XlaMetadata, traits, XLA_FFI_Metadata, traits);
MEMBER(XlaMetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
MEMBER(XlaErrorCreate, message, XLA_FFI_Error_Create_Args, message);
MEMBER(XlaErrorCreate, code, XLA_FFI_Error_Create_Args, errc);
MEMBER(XlaFutureCreate, future, XLA_FFI_Future_Create_Args, future);
MEMBER(XlaFutureSetAvailable, future, XLA_FFI_Future_SetAvailable_Args, future);
MEMBER(XlaFutureSetError, future, XLA_FFI_Future_SetError_Args, future);
MEMBER(XlaFutureSetError, error, XLA_FFI_Future_SetError_Args, error);
MEMBER(XlaStreamGet, context, XLA_FFI_Stream_Get_Args, ctx);
MEMBER(XlaStreamGet, stream, XLA_FFI_Stream_Get_Args, stream);
MEMBER(XlaApi, create_error, XLA_FFI_Api, XLA_FFI_Error_Create);
MEMBER(XlaApi, get_stream, XLA_FFI_Api, XLA_FFI_Stream_Get);
MEMBER(XlaApi, create_future, XLA_FFI_Api, XLA_FFI_Future_Create);
MEMBER(XlaApi, set_available, XLA_FFI_Api, XLA_FFI_Future_SetAvailable);
MEMBER(XlaApi, set_error, XLA_FFI_Api, XLA_FFI_Future_SetError);
VALUE(XlaStage::execute, XLA_FFI_ExecutionStage_EXECUTE);
VALUE(XlaAttributeType::scalar, XLA_FFI_AttrType_SCALAR);
VALUE(XlaAttributeType::string, XLA_FFI_AttrType_STRING);
VALUE(AbslCode::unknown, XLA_FFI_Error_Code_UNKNOWN);
VALUE(AbslCode::invalid_argument, XLA_FFI_Error_Code_INVALID_ARGUMENT);
VALUE(AbslCode::deadline_exceeded, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
VALUE(AbslCode::resource_exhausted, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
VALUE(AbslCode::failed_precondition, XLA_FFI_Error_Code_FAILED_PRECONDITION);
VALUE(AbslCode::aborted, XLA_FFI_Error_Code_ABORTED);
VALUE(AbslCode::unimplemented, XLA_FFI_Error_Code_UNIMPLEMENTED);
VALUE(AbslCode::internal, XLA_FFI_Error_Code_INTERNAL);
DTYPE(boolean, PRED);
DTYPE(s8, S8);
DTYPE(s16, S16);
DTYPE(s32, S32);
DTYPE(s64, S64);
DTYPE(u8, U8);
DTYPE(u16, U16);
DTYPE(u32, U32);
DTYPE(u64, U64);
DTYPE(f16, F16);
DTYPE(f32, F32);
DTYPE(f64, F64);
DTYPE(c64, C64);
DTYPE(bf16, BF16);
DTYPE(c128, C128);
DTYPE(f8e5m2, F8E5M2);
DTYPE(f8e4m3fn, F8E4M3FN);
DTYPE(f8e5m2fnuz, F8E5M2FNUZ);
DTYPE(f8e4m3fnuz, F8E4M3FNUZ);

int main() { std::printf("%d.%d\n", XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); }
