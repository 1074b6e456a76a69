// The definitions of the TensorFlow operations, which are registered while tf.load_op_library opens this library.
#include <string>
#include <vector>

#include "tensorflow/call.h"
#include "tensorflow/world.h"

namespace sirtaki::tensorflow {
namespace {

// Gives each output the shape of its input.
void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const auto count = static_cast<int>(tf().shape_inputs(context));
  for (int i = 1; i < count && is_ok(status); ++i) {
    const Shape shape;
    tf().input_shape(context, i, shape.get(), status);
    if (is_ok(status)) tf().set_output_shape(context, i - 1, shape.get(), status);
  }
}

// Gives output i the shape of input i + 1, with a first dimension that is unknown until the operation has run.
void other_rows(TF_ShapeInferenceContext* context, int i, TF_Status* status) {
  const Shape whole;
  tf().input_shape(context, i + 1, whole.get(), status);
  if (!is_ok(status)) return;
  if (!tf().is_rank_known(context, whole.get())) return tf().set_output_shape(context, i, whole.get(), status);
  const Shape checked, row, result, rows(tf().vector_shape(context, static_cast<size_t>(-1)));
  tf().with_rank_at_least(context, whole.get(), 1, checked.get(), status);
  if (is_ok(status)) tf().part_of_shape(context, checked.get(), 1, INT64_MAX, row.get(), status);
  if (is_ok(status)) tf().concatenate_shapes(context, rows.get(), row.get(), result.get(), status);
  if (is_ok(status)) tf().set_output_shape(context, i, result.get(), status);
}

void shapes_of_other_rows(TF_ShapeInferenceContext* context, TF_Status* status) {
  const auto count = static_cast<int>(tf().shape_inputs(context)) - 1;
  for (int i = 0; i < count && is_ok(status); ++i) other_rows(context, i, status);
}

void shapes_of_alltoall(TF_ShapeInferenceContext* context, TF_Status* status) {
  other_rows(context, 0, status);
  const Shape received(tf().vector_shape(context, static_cast<size_t>(-1)));
  if (is_ok(status)) tf().set_output_shape(context, 1, received.get(), status);
}

void scalar(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape(tf().scalar_shape(context));
  tf().set_output_shape(context, 0, shape.get(), status);
}

void vector(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape(tf().vector_shape(context, static_cast<size_t>(-1)));
  tf().set_output_shape(context, 0, shape.get(), status);
}

struct Operation {
  const char* name;
  std::vector<const char*> attributes, inputs, outputs;
  CApi::InferShapes shapes;
};

// Returns whether TensorFlow has accepted the definition.
bool define(const Operation& operation) {
  KeptStatus outcome;
  TF_OpDefinitionBuilder* definition = tf().new_definition(operation.name);
  for (const char* attribute : operation.attributes) tf().add_attribute(definition, attribute);
  for (const char* input : operation.inputs) tf().add_input(definition, input);
  for (const char* output : operation.outputs) tf().add_output(definition, output);
  tf().set_stateful(definition, true);  // identical operations must not be merged, nor unused ones pruned
  if (operation.shapes) tf().set_shapes(definition, operation.shapes);
  tf().register_definition(definition, outcome.get());
  return outcome.is_ok();
}

void register_kernel(const char* operation, TF_KernelBuilder* kernel) {
  const KeptStatus outcome;
  tf().register_kernel(operation, kernel, outcome.get());
}

template <int32_t kind, bool on_gpu>
void add_kernel(const char* operation) {
  const CApi::Create create = [](TF_OpKernelConstruction* construction) -> void* {
    return Kernel::create(kind, on_gpu, construction);
  };
  const CApi::ComputeAsync compute = [](void* made, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done) {
    Call::start(*static_cast<const Kernel*>(made), where, done);
  };
  const CApi::Delete destroy = [](void* made) { delete static_cast<Kernel*>(made); };
  TF_KernelBuilder* kernel = tf().new_async_kernel(operation, on_gpu ? "GPU" : "CPU", create, compute, destroy);
  if (on_gpu) tf().keep_on_host(kernel, "label");
  register_kernel(operation, kernel);
}

// On GPUs are the operations that can allocate their results when they begin: TensorFlow's memory may be in use by
// kernels of its streams until then, and Call waits for these only at the beginning.
template <int32_t kind>
void add_collective(Operation operation) {
  operation.attributes.push_back("process_set: int");
  operation.inputs.insert(operation.inputs.begin(), "label: uint8");  // the name by which ranks match the operation
  if (!define(operation)) return;
  add_kernel<kind, false>(operation.name);
  if (kind == SRT_ALLREDUCE || kind == SRT_REDUCESCATTER || kind == SRT_BROADCAST)
    add_kernel<kind, true>(operation.name);
}

void add_world(const Operation& operation, CApi::ComputeAsync compute) {
  if (!define(operation)) return;
  const CApi::Create create = [](TF_OpKernelConstruction*) -> void* { return nullptr; };
  register_kernel(operation.name, tf().new_async_kernel(operation.name, "CPU", create, compute, [](void*) {}));
}

// Registers the operations. TensorFlow accepts registrations only while it opens a library. If its C API cannot be
// used, nothing is registered, and Python reports why.
__attribute__((constructor)) void register_operations() {
  if (!tf().is_usable()) return;
  const char* list = "T: list(type) >= 0";
  const std::vector<const char*> reduction = {list, "reduce_op: int", "prescale: string = '1'",
                                              "postscale: string = '1'"};
  add_collective<SRT_ALLREDUCE>({"SirtakiAllreduce", reduction, {"tensors: T"}, {"results: T"}, same_shapes});
  add_collective<SRT_REDUCESCATTER>(
      {"SirtakiReducescatter", reduction, {"tensors: T"}, {"results: T"}, shapes_of_other_rows});
  add_collective<SRT_ALLGATHER>({"SirtakiAllgather", {list}, {"tensors: T"}, {"results: T"}, shapes_of_other_rows});
  add_collective<SRT_BROADCAST>({"SirtakiBroadcast", {list, "root: int"}, {"tensors: T"}, {"results: T"}, same_shapes});
  add_collective<SRT_ALLTOALL>({"SirtakiAlltoall",
                                {"T: list(type) = [DT_FLOAT]"},
                                {"tensors: T", "splits: int64"},
                                {"results: T", "received: int64"},
                                shapes_of_alltoall});
  add_collective<SRT_BARRIER>({"SirtakiBarrier", {}, {}, {}, nullptr});
  add_collective<SRT_JOIN>({"SirtakiJoin", {}, {}, {"last: int32"}, scalar});
  add_world({"SirtakiPlace", {}, {}, {"place: int32"}, vector}, compute_place);
  add_world({"SirtakiMembers", {}, {"process_set: int32"}, {"ranks: int32"}, vector}, compute_members);
}

}  // namespace
}  // namespace sirtaki::tensorflow
