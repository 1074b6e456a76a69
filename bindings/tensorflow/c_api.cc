#include "tensorflow/c_api.h"

#include <dlfcn.h>

namespace sirtaki::tensorflow {

Finder::Finder() : library_(dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD)) {}

Finder::Symbol Finder::operator()(const char* name) {
  void* const address = library_ ? dlsym(library_, name) : nullptr;
  has_found_all_ = has_found_all_ && address;
  return {address};
}

const CApi& tf() {
  static const CApi functions;
  return functions;
}

}  // namespace sirtaki::tensorflow
