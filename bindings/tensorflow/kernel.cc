#include "tensorflow/kernel.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>

#include "native/dtype_map.h"
#include "tensorflow/owned.h"

namespace sirtaki::tensorflow {
namespace {

const srt_dtype* find_dtype(DataType type) {
  static const bindings::DTypeMap known(std::initializer_list<std::pair<DataType, const char*>>{
      {1, "float32"},
      {2, "float64"},
      {3, "int32"},
      {4, "uint8"},
      {5, "int16"},
      {6, "int8"},
      {8, "complex64"},
      {9, "int64"},
      {10, "bool"},
      {14, "bfloat16"},
      {17, "uint16"},
      {18, "complex128"},
      {19, "float16"},
      {22, "uint32"},
      {23, "uint64"},
      {24, "float8_e5m2"},
      {25, "float8_e4m3fn"},
      {26, "float8_e4m3fnuz"},
      {28, "float8_e5m2fnuz"},
  });
  return known.find(type);
}

class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction) : construction_(construction) {}

  int32_t integer(const char* name) {
    int64_t value = 0;
    if (outcome_.is_ok()) tf().attribute_integer(construction_, name, &value, outcome_.get());
    return static_cast<int32_t>(value);
  }

  // Reads a factor, which is passed as text because TensorFlow's floating-point attributes have only 32 bits.
  double factor(const char* name) {
    std::array<char, 64> text{};
    if (outcome_.is_ok()) tf().attribute_text(construction_, name, text.data(), text.size() - 1, outcome_.get());
    return std::strtod(text.data(), nullptr);
  }

  std::vector<DataType> types(const char* name) {
    int32_t count = 0, bytes = 0;
    if (outcome_.is_ok()) tf().attribute_size(construction_, name, &count, &bytes, outcome_.get());
    std::vector<DataType> types(static_cast<size_t>(std::max(count, 0)));
    if (outcome_.is_ok() && count > 0) tf().attribute_types(construction_, name, types.data(), count, outcome_.get());
    return types;
  }

  KeptStatus& outcome() { return outcome_; }

 private:
  TF_OpKernelConstruction* construction_;
  KeptStatus outcome_;
};

void read_dtypes(Kernel& kernel, KeptStatus& outcome) {
  for (DataType type : kernel.types) {
    const srt_dtype* dtype = find_dtype(type);
    kernel.dtypes.push_back(dtype ? dtype->code : -1);
    if (!dtype)
      outcome.fail(
          {SRT_UNSUPPORTED, "sirtaki cannot move tensors of TensorFlow's dtype number " + std::to_string(type) +
                                "; it takes integers, floating and complex numbers, and bool: convert it first"});
  }
}

}  // namespace

Kernel* Kernel::create(int32_t kind, bool on_gpu, TF_OpKernelConstruction* construction) {
  Attributes attributes(construction);
  auto kernel = std::make_unique<Kernel>();
  kernel->kind = kind;
  kernel->on_gpu = on_gpu;
  kernel->process_set = attributes.integer("process_set");
  if (kernel->reduces()) {
    kernel->reduce_op = attributes.integer("reduce_op");
    kernel->prescale = attributes.factor("prescale");
    kernel->postscale = attributes.factor("postscale");
  }
  if (kind == SRT_BROADCAST) kernel->root = attributes.integer("root");
  if (kind != SRT_BARRIER && kind != SRT_JOIN) kernel->types = attributes.types("T");
  read_dtypes(*kernel, attributes.outcome());
  if (attributes.outcome().is_ok()) return kernel.release();
  tf().construction_failed(construction, attributes.outcome().get());
  return nullptr;
}

}  // namespace sirtaki::tensorflow
