#include "tensorflow/c_api.h"

#include <dlfcn.h>

namespace sirtaki::tensorflow {
namespace {

// A function whose existence proves that the completion callback is a std::function of libstdc++ (see done.h).
constexpr const char* proof_of_callback =
    "_ZN10tensorflow6Device12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextESt8functionIFvvEE";

class Finder {
 public:
  explicit Finder(void* library) : library_(library) {}
  const std::string& missing() const { return missing_; }

  template <typename Function>
  Finder& operator()(const char* name, Function& out) {
    out = reinterpret_cast<Function>(dlsym(library_, name));
    if (!out && missing_.empty()) missing_ = name;
    return *this;
  }

 private:
  void* library_;
  std::string missing_;
};

void find_values(Finder& find, CApi& out) {
  find("TF_NewStatus", out.new_status)("TF_DeleteStatus", out.delete_status)("TF_SetStatus", out.set_status);
  find("TF_GetCode", out.code_of)("TF_Message", out.text_of);
  find("TF_TensorData", out.tensor_data)("TF_TensorType", out.tensor_type)("TF_NumDims", out.tensor_dimensions);
  find("TF_Dim", out.tensor_dimension)("TF_TensorByteSize", out.tensor_bytes)("TF_DeleteTensor", out.delete_tensor);
}

void find_definitions(Finder& find, CApi& out) {
  find("TF_NewOpDefinitionBuilder", out.new_definition)("TF_OpDefinitionBuilderAddAttr", out.add_attribute);
  find("TF_OpDefinitionBuilderAddInput", out.add_input)("TF_OpDefinitionBuilderAddOutput", out.add_output);
  find("TF_OpDefinitionBuilderSetIsStateful", out.set_stateful);
  find("TF_OpDefinitionBuilderSetShapeInferenceFunction", out.set_shapes);
  find("TF_RegisterOpDefinition", out.register_definition);
  find("TF_NewAsyncKernelBuilder", out.new_async_kernel)("TF_RegisterKernelBuilder", out.register_kernel);
}

void find_shapes(Finder& find, CApi& out) {
  find("TF_ShapeInferenceContextNumInputs", out.shape_inputs)("TF_NewShapeHandle", out.new_shape);
  find("TF_DeleteShapeHandle", out.delete_shape)("TF_ShapeInferenceContextGetInput", out.input_shape);
  find("TF_ShapeInferenceContextSetOutput", out.set_output_shape);
  find("TF_ShapeInferenceContextVectorFromSize", out.vector_shape);
  find("TF_ShapeInferenceContextScalar", out.scalar_shape);
  find("TF_ShapeInferenceContextRankKnown", out.is_rank_known);
  find("TF_ShapeInferenceContextWithRankAtLeast", out.with_rank_at_least);
  find("TF_ShapeInferenceContextSubshape", out.part_of_shape);
  find("TF_ShapeInferenceContextConcatenateShapes", out.concatenate_shapes);
}

void find_kernels(Finder& find, CApi& out) {
  find("TF_OpKernelConstruction_GetAttrSize", out.attribute_size);
  find("TF_OpKernelConstruction_GetAttrInt64", out.attribute_integer);
  find("TF_OpKernelConstruction_GetAttrString", out.attribute_text);
  find("TF_OpKernelConstruction_GetAttrTypeList", out.attribute_types);
  find("TF_OpKernelConstruction_Failure", out.construction_failed);
  find("TF_GetInput", out.input)("TF_AllocateOutput", out.allocate_output);
  find("TF_ForwardInputOrAllocateOutput", out.forward_or_allocate);
  find("TF_OpKernelContext_Failure", out.compute_failed);
}

}  // namespace

std::string find_c_api(CApi& out) {
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (!library) return "libtensorflow_framework.so.2 is not loaded";
  Finder find(library);
  find_values(find, out);
  find_definitions(find, out);
  find_shapes(find, out);
  find_kernels(find, out);
  void (*proof)() = nullptr;
  find(proof_of_callback, proof);
  dlclose(library);  // it stays loaded, because Python keeps it open
  return find.missing().empty() ? "" : "TensorFlow has no " + find.missing();
}

const CApi& tf() {
  static const CApi functions = [] {
    CApi found{};
    find_c_api(found);
    return found;
  }();
  return functions;
}

}  // namespace sirtaki::tensorflow
