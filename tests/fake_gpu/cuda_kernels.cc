// The functions of the fake libcuda.so.1 that load and launch kernels. They run the text that they are given.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "fake_gpu/cuda_state.h"
#include "fake_gpu/ptx.h"

using namespace fake;

namespace sirtaki {

struct CudaModuleTag {
  CudaContext context;
  std::map<std::string, CudaKernelTag> kernels;
};

struct CudaKernelTag {
  CudaContext context;
  std::shared_ptr<const ptx::Kernel> code;  // which launched tasks use, too
};

}  // namespace sirtaki

namespace {

using namespace sirtaki;

constexpr CudaResult invalid_text = 218, not_found = 500;
constexpr unsigned most_threads = 1024, most_rows = 65535;

std::set<CudaModule>& modules() {
  static auto* all = new std::set<CudaModule>;
  return *all;
}

bool is_kernel(CudaKernel kernel) {
  return std::any_of(modules().begin(), modules().end(), [&](const CudaModule loaded) {
    return std::any_of(loaded->kernels.begin(), loaded->kernels.end(),
                       [&](const auto& named) { return &named.second == kernel; });
  });
}

// Joins what lies side by side.
std::vector<Range> joined(std::vector<Range> ranges) {
  const auto end = [](const Range& range) { return static_cast<const char*>(range.address) + range.bytes; };
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::pair(a.is_written, a.address) < std::pair(b.is_written, b.address);
  });
  std::vector<Range> all;
  for (const Range& range : ranges) {
    if (!all.empty() && all.back().is_written == range.is_written && end(all.back()) == range.address)
      all.back().bytes += range.bytes;
    else all.push_back(range);
  }
  return all;
}

}  // namespace

namespace sirtaki {

int cuModuleLoadData(CudaModule* out, const void* text) {
  FAKE_GPU_ENTER();
  FAKE_GPU_UNSAFE_IN_CAPTURE();
  FAKE_GPU_REQUIRE(current_context(), "there is no current context", invalid_context);
  std::unique_ptr<CudaModuleTag> made(new CudaModuleTag{current_context(), {}});
  try {
    for (auto& [name, code] : ptx::parse(static_cast<const char*>(text)))
      made->kernels[name] = {current_context(), std::make_shared<const ptx::Kernel>(std::move(code))};
  } catch (const std::runtime_error& problem) {
    return misuse(__func__, problem.what(), invalid_text);
  }
  const std::lock_guard lock(gpus().mutex);
  modules().insert(*out = made.release());
  ++gpus().alive;
  return cuda_success;
}

int cuModuleUnload(CudaModule module) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(modules().contains(module) && module->context == current_context(),
                   "this is no module of the current context", invalid_handle);
  modules().erase(module);
  delete module;
  --gpus().alive;
  return cuda_success;
}

int cuModuleGetFunction(CudaKernel* out, CudaModule module, const char* name) {
  FAKE_GPU_ENTER();
  const std::lock_guard lock(gpus().mutex);
  FAKE_GPU_REQUIRE(modules().contains(module) && module->context == current_context(),
                   "this is no module of the current context", invalid_handle);
  const auto found = module->kernels.find(name);
  FAKE_GPU_REQUIRE(found != module->kernels.end(), "the module has no such kernel", not_found);
  *out = &found->second;
  return cuda_success;
}

// The kernel's memory is found by a run that touches none: how it uses the argument is its own affair.
int cuLaunchKernel(CudaKernel kernel, unsigned columns, unsigned rows, unsigned layers, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned shared_bytes, CudaStream stream, void** arguments,
                   void** options) {
  FAKE_GPU_ENTER();
  std::shared_ptr<const ptx::Kernel> code;
  {
    const std::lock_guard lock(gpus().mutex);
    FAKE_GPU_REQUIRE(is_kernel(kernel) && kernel->context == current_context(),
                     "this is no kernel of the current context", invalid_handle);
    code = kernel->code;
  }
  FAKE_GPU_REQUIRE(columns > 0 && rows > 0 && rows <= most_rows && threads > 0 && threads <= most_threads,
                   "there is no such grid", invalid_value);
  FAKE_GPU_REQUIRE(layers == 1 && threads_y == 1 && threads_z == 1 && shared_bytes == 0 && !options,
                   "the fake knows grids of two dimensions only, without shared memory", invalid_value);
  FAKE_GPU_REQUIRE(code->argument_bytes <= 4096, "a kernel's parameters may have 4 KiB", invalid_value);
  std::vector<char> argument(code->argument_bytes);
  std::memcpy(argument.data(), arguments[0], argument.size());
  const ptx::Grid grid{columns, rows, threads};
  std::vector<Range> ranges;
  try {
    ptx::run(*code, grid, argument, &ranges);
  } catch (const std::runtime_error& problem) {
    return misuse(__func__, problem.what(), invalid_value);
  }
  return enqueue(stream, {__func__, joined(std::move(ranges)),
                          [code, grid, argument] { ptx::run(*code, grid, argument, nullptr); }});
}

}  // namespace sirtaki
