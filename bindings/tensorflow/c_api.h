// The part of TensorFlow's C API that kernels need, declared here so that neither its headers nor its libraries are
// needed to build. The functions are looked up by name in the TensorFlow that the process has loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

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

struct CApi {
  using Create = void* (*)(TF_OpKernelConstruction*);
  using ComputeAsync = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
  using Delete = void (*)(void*);
  using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

  TF_Status* (*new_status)();
  void (*delete_status)(TF_Status*);
  void (*set_status)(TF_Status*, int code, const char* text);
  int (*code_of)(const TF_Status*);
  const char* (*text_of)(const TF_Status*);

  void* (*tensor_data)(const TF_Tensor*);
  DataType (*tensor_type)(const TF_Tensor*);
  int (*tensor_dimensions)(const TF_Tensor*);
  int64_t (*tensor_dimension)(const TF_Tensor*, int);
  size_t (*tensor_bytes)(const TF_Tensor*);
  void (*delete_tensor)(TF_Tensor*);

  TF_OpDefinitionBuilder* (*new_definition)(const char* name);
  void (*add_attribute)(TF_OpDefinitionBuilder*, const char*);
  void (*add_input)(TF_OpDefinitionBuilder*, const char*);
  void (*add_output)(TF_OpDefinitionBuilder*, const char*);
  void (*set_stateful)(TF_OpDefinitionBuilder*, bool);
  void (*set_shapes)(TF_OpDefinitionBuilder*, InferShapes);
  void (*register_definition)(TF_OpDefinitionBuilder*, TF_Status*);

  TF_KernelBuilder* (*new_async_kernel)(const char* operation, const char* device, Create, ComputeAsync, Delete);
  void (*register_kernel)(const char* name, TF_KernelBuilder*, TF_Status*);

  int64_t (*shape_inputs)(TF_ShapeInferenceContext*);
  TF_ShapeHandle* (*new_shape)();
  void (*delete_shape)(TF_ShapeHandle*);
  void (*input_shape)(TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*);
  void (*set_output_shape)(TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*);
  TF_ShapeHandle* (*vector_shape)(TF_ShapeInferenceContext*, size_t);
  TF_ShapeHandle* (*scalar_shape)(TF_ShapeInferenceContext*);
  int (*is_rank_known)(TF_ShapeInferenceContext*, TF_ShapeHandle*);
  void (*with_rank_at_least)(TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*);
  void (*part_of_shape)(TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*);
  void (*concatenate_shapes)(TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*);

  void (*attribute_size)(TF_OpKernelConstruction*, const char*, int32_t* list, int32_t* total, TF_Status*);
  void (*attribute_integer)(TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*);
  void (*attribute_text)(TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*);
  void (*attribute_types)(TF_OpKernelConstruction*, const char*, DataType*, int, TF_Status*);
  void (*construction_failed)(TF_OpKernelConstruction*, TF_Status*);

  void (*input)(TF_OpKernelContext*, int, TF_Tensor**, TF_Status*);
  TF_Tensor* (*allocate_output)(TF_OpKernelContext*, int, DataType, const int64_t*, int, size_t, TF_Status*);
  TF_Tensor* (*forward_or_allocate)(TF_OpKernelContext*, const int* candidates, int count, int output, const int64_t*,
                                    int, int* forwarded, TF_Status*);
  void (*compute_failed)(TF_OpKernelContext*, TF_Status*);
};

// Looks up the functions. Returns why they cannot be used, or "" if they can: TensorFlow is not loaded, is older than
// 2.13, or was built with a C++ library other than libstdc++.
std::string find_c_api(CApi& out);

// Returns the functions, looked up once: TensorFlow calls kernels through plain function pointers, which cannot carry
// them.
const CApi& tf();

}  // namespace sirtaki::tensorflow
