// The part of TensorFlow's C API that kernels need, declared here so that neither its headers nor its libraries are
// needed to build. The functions are looked up by name in the TensorFlow that the process has loaded.
#pragma once

#include <cstddef>
#include <cstdint>

struct TF_Status;
struct TF_Tensor;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_AsyncOpKernelDoneCallback;

namespace sirtaki::tensorflow {

// TensorFlow's dtype numbers, which never change because saved models contain them.
using DataType = int;
constexpr DataType type_int32 = 3, type_int64 = 9;

// Finds functions in the TensorFlow library that the process has loaded.
class Finder {
 public:
  struct Symbol {
    void* address;

    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };

  Finder();
  Symbol operator()(const char* name);
  bool has_found_all() const { return has_found_all_; }

 private:
  void* library_;
  bool has_found_all_ = true;
};

struct CApi {
  using Inference = TF_ShapeInferenceContext;
  using Construction = TF_OpKernelConstruction;
  using Execution = TF_OpKernelContext;
  using Create = void* (*)(Construction*);
  using ComputeAsync = void (*)(void*, Execution*, TF_AsyncOpKernelDoneCallback*);
  using Delete = void (*)(void*);
  using InferShapes = void (*)(Inference*, TF_Status*);

  Finder find;  // first, because it initialises the others

  TF_Status* (*new_status)() = find("TF_NewStatus");
  void (*delete_status)(TF_Status*) = find("TF_DeleteStatus");
  void (*set_status)(TF_Status*, int code, const char* text) = find("TF_SetStatus");
  int (*code_of)(const TF_Status*) = find("TF_GetCode");

  void* (*tensor_data)(const TF_Tensor*) = find("TF_TensorData");
  int (*tensor_dimensions)(const TF_Tensor*) = find("TF_NumDims");
  int64_t (*tensor_dimension)(const TF_Tensor*, int) = find("TF_Dim");
  size_t (*tensor_bytes)(const TF_Tensor*) = find("TF_TensorByteSize");
  void (*delete_tensor)(TF_Tensor*) = find("TF_DeleteTensor");

  TF_OpDefinitionBuilder* (*new_definition)(const char* name) = find("TF_NewOpDefinitionBuilder");
  void (*add_attribute)(TF_OpDefinitionBuilder*, const char*) = find("TF_OpDefinitionBuilderAddAttr");
  void (*add_input)(TF_OpDefinitionBuilder*, const char*) = find("TF_OpDefinitionBuilderAddInput");
  void (*add_output)(TF_OpDefinitionBuilder*, const char*) = find("TF_OpDefinitionBuilderAddOutput");
  void (*set_stateful)(TF_OpDefinitionBuilder*, bool) = find("TF_OpDefinitionBuilderSetIsStateful");
  void (*set_shapes)(TF_OpDefinitionBuilder*, InferShapes) = find("TF_OpDefinitionBuilderSetShapeInferenceFunction");
  void (*register_definition)(TF_OpDefinitionBuilder*, TF_Status*) = find("TF_RegisterOpDefinition");

  TF_KernelBuilder* (*new_async_kernel)(const char* operation, const char* device, Create, ComputeAsync,
                                        Delete) = find("TF_NewAsyncKernelBuilder");
  void (*keep_on_host)(TF_KernelBuilder*, const char* input) = find("TF_KernelBuilder_HostMemory");
  void (*register_kernel)(const char* name, TF_KernelBuilder*, TF_Status*) = find("TF_RegisterKernelBuilder");

  int64_t (*shape_inputs)(Inference*) = find("TF_ShapeInferenceContextNumInputs");
  TF_ShapeHandle* (*new_shape)() = find("TF_NewShapeHandle");
  void (*delete_shape)(TF_ShapeHandle*) = find("TF_DeleteShapeHandle");
  void (*input_shape)(Inference*, int, TF_ShapeHandle*, TF_Status*) = find("TF_ShapeInferenceContextGetInput");
  void (*set_output_shape)(Inference*, int, TF_ShapeHandle*, TF_Status*) = find("TF_ShapeInferenceContextSetOutput");
  TF_ShapeHandle* (*vector_shape)(Inference*, size_t) = find("TF_ShapeInferenceContextVectorFromSize");
  TF_ShapeHandle* (*scalar_shape)(Inference*) = find("TF_ShapeInferenceContextScalar");
  int (*is_rank_known)(Inference*, TF_ShapeHandle*) = find("TF_ShapeInferenceContextRankKnown");
  void (*with_rank_at_least)(Inference*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*,
                             TF_Status*) = find("TF_ShapeInferenceContextWithRankAtLeast");
  void (*part_of_shape)(Inference*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*,
                        TF_Status*) = find("TF_ShapeInferenceContextSubshape");
  void (*concatenate_shapes)(Inference*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*,
                             TF_Status*) = find("TF_ShapeInferenceContextConcatenateShapes");

  void (*attribute_size)(Construction*, const char*, int32_t* list, int32_t* total,
                         TF_Status*) = find("TF_OpKernelConstruction_GetAttrSize");
  void (*attribute_integer)(Construction*, const char*, int64_t*,
                            TF_Status*) = find("TF_OpKernelConstruction_GetAttrInt64");
  void (*attribute_text)(Construction*, const char*, char*, size_t,
                         TF_Status*) = find("TF_OpKernelConstruction_GetAttrString");
  void (*attribute_types)(Construction*, const char*, DataType*, int,
                          TF_Status*) = find("TF_OpKernelConstruction_GetAttrTypeList");
  void (*construction_failed)(Construction*, TF_Status*) = find("TF_OpKernelConstruction_Failure");

  void (*input)(Execution*, int, TF_Tensor**, TF_Status*) = find("TF_GetInput");
  TF_Tensor* (*allocate_output)(Execution*, int, DataType, const int64_t*, int, size_t,
                                TF_Status*) = find("TF_AllocateOutput");
  TF_Tensor* (*forward_or_allocate)(Execution*, const int* candidates, int count, int output, const int64_t*, int,
                                    int* forwarded, TF_Status*) = find("TF_ForwardInputOrAllocateOutput");
  void (*compute_failed)(Execution*, TF_Status*) = find("TF_OpKernelContext_Failure");

  // Exists only if the completion callback is a std::function of libstdc++ (see done.h).
  void (*proof_of_callback)() =
      find("_ZN10tensorflow6Device12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextESt8functionIFvvEE");

  // Returns false if TensorFlow is not loaded, is older than 2.13, or was built with another C++ library.
  bool is_usable() const { return find.has_found_all(); }
};

// Returns the functions, looked up once: TensorFlow calls kernels through plain function pointers, which cannot carry
// them.
const CApi& tf();

}  // namespace sirtaki::tensorflow
