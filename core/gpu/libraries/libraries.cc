#include "gpu/libraries/libraries.h"

#include <cstdlib>

#include "base/system/library.h"

namespace sirtaki {
namespace {

constexpr CudaResult cuda_no_device = 100;

#define SIRTAKI_FIND(member, symbol, parameters) library.find(#symbol, functions.member.named(#symbol, calls));
#define SIRTAKI_FIND_IF_THERE(member, symbol, parameters) \
  library.find_if_there(#symbol, functions.member.named(#symbol, calls));
void find_functions(Library& library, RunningCalls* calls, CudaFunctions& functions) {
  SIRTAKI_CUDA_FUNCTIONS(SIRTAKI_FIND)
  SIRTAKI_CUDA_LATER_FUNCTIONS(SIRTAKI_FIND_IF_THERE)
}
#undef SIRTAKI_FIND_IF_THERE

void find_functions(Library& library, RunningCalls* calls, NcclFunctions& functions){
    SIRTAKI_NCCL_FUNCTIONS(SIRTAKI_FIND) SIRTAKI_FIND(error_string, ncclGetErrorString, )
        SIRTAKI_FIND(last_error, ncclGetLastError, )}
#undef SIRTAKI_FIND

// Returns the file, and why it is not that of the setting gpu_libraries: a second copy would not share the state of the
// copy that a framework uses.
std::string source_of(const Library& library) {
  if (library.passed_over().empty()) return " from " + library.path();
  return " from " + library.path() + " (which this program had loaded already; LD_PRELOAD=" + library.passed_over() +
         " loads that instead)";
}

std::string cuda_version_text(int code, const Library& library) {
  return "libcuda " + std::to_string(code / 1000) + "." + std::to_string(code % 1000 / 10) + source_of(library);
}

// Returns NCCL's version as text. Since version 2.9, the minor version has two digits.
std::string nccl_version_text(int code, const Library& library) {
  const int major = code < 10'000 ? 1000 : 10'000;
  return format("libnccl %d.%d.%d", code / major, code % major / 100, code % 100) + source_of(library);
}

std::string cuda_words(const CudaFunctions& cuda, CudaResult result) {
  const char* words = nullptr;
  if (cuda.error_string(result, &words) != cuda_success || !words) words = "an error without a name";
  return one_line(words) + " (error " + std::to_string(result) + ")";
}

// Marks a library as unusable, for a reason.
void refuse(LibraryFound& found, const std::string& text) {
  found.version = 0;
  found.text = text;
}

constexpr const char* cuda_advice = "; it comes with NVIDIA's driver";
constexpr const char* nccl_advice =
    "; install the package nvidia-nccl-cu12 (CUDA 13: nvidia-nccl-cu13), or name the folder of NCCL 2.19 or later with "
    "the setting gpu_libraries";

}  // namespace

GpuLibraries::GpuLibraries(const Config& config, std::shared_ptr<RunningCalls> calls) : calls_(std::move(calls)) {
  open_cuda(config.text(Knob::gpu_libraries));
  open_nccl(config.text(Knob::gpu_libraries));
}

void GpuLibraries::open_cuda(const std::string& folders) {
  Library library("libcuda.so.1", folders);
  LibraryFound& found = found_cuda_;
  found.path = library.path();
  if (!library.is_open()) return refuse(found, library.absence() + cuda_advice);
  find_functions(library, calls_.get(), cuda_);
  if (!library.missing().empty()) return refuse(found, library.incompleteness() + cuda_advice);
  CudaResult result = cuda_.driver_version(&found.version);
  const std::string name =
      result == cuda_success ? cuda_version_text(found.version, library) : "libcuda" + source_of(library);
  if (result == cuda_success) result = cuda_.init(0);
  if (result == cuda_success) result = cuda_.device_count(&device_count_);
  if (result == cuda_success && device_count_ == 0) result = cuda_no_device;
  if (result == cuda_success) {
    found.text = name;
    return;
  }
  device_count_ = 0;
  const char* visible = result == cuda_no_device ? std::getenv("CUDA_VISIBLE_DEVICES") : nullptr;
  refuse(found, name + ", but no GPU: " + cuda_words(cuda_, result) +
                    (visible ? "; CUDA_VISIBLE_DEVICES is '" + one_line(visible) + "'" : ""));
}

void GpuLibraries::open_nccl(const std::string& folders) {
  Library library("libnccl.so.2", folders);
  LibraryFound& found = found_nccl_;
  found.path = library.path();
  if (!library.is_open()) return refuse(found, library.absence() + nccl_advice);
  find_functions(library, calls_.get(), nccl_);
  if (nccl_.version && nccl_.version(&found.version) != nccl_success) found.version = 0;
  // An old version also lacks functions, but its version is the better explanation.
  if (found.version > 0 && found.version < oldest_nccl)
    return refuse(found, nccl_version_text(found.version, library) + " is too old" + nccl_advice);
  if (!library.missing().empty()) return refuse(found, library.incompleteness() + nccl_advice);
  if (found.version == 0) return refuse(found, found.path + " does not tell its version" + nccl_advice);
  found.text = nccl_version_text(found.version, library);
}

Status GpuLibraries::check(CudaResult result, const char* attempt) const {
  if (result == cuda_success) return Status::ok();
  const auto code = result == cuda_out_of_memory ? SRT_OUT_OF_MEMORY : SRT_DEVICE;
  return {code, std::string(attempt) + " failed; CUDA says: " + cuda_words(cuda_, result)};
}

Status GpuLibraries::check_nccl(NcclResult result, const char* attempt, NcclCommunicator communicator) const {
  if (result == nccl_success || result == nccl_in_progress) return Status::ok();
  const char* words = nccl_.error_string(result);
  const char* more = nccl_.last_error(communicator);
  std::string text = std::string(attempt) + " failed; NCCL says: " + one_line(words ? words : "") + " (result " +
                     std::to_string(result) + ")";
  if (more && *more) text += ": " + one_line(more);
  return {SRT_DEVICE, std::move(text)};
}

}  // namespace sirtaki
