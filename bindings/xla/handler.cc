// The handlers that compiled programs call. On the CPU, results are delivered asynchronously, so that no XLA thread
// waits for another rank: ranks may start calls in any order without deadlock. On a GPU, results are delivered on the
// stream.
#include "xla/handler.h"

#include <algorithm>
#include <exception>
#include <new>

#include "native/requests.h"
#include "xla/ffi.h"
#include "xla/on_stream.h"
#include "xla/pending.h"

namespace sirtaki::bindings {
namespace {

constexpr int32_t newest_minor = 3;  // supported versions: 0.1 to this

CallStatus check_members(srt_context* context, const XlaCall& call) {
  if (!call.members()) return {};
  const int32_t members = srt_process_set(context, call.process_set(), nullptr, 0);
  if (members < 0 || members == call.members()) return {};  // the core reports a missing set
  return {SRT_INVALID_ARGUMENT, "the program was compiled for " + std::to_string(call.members()) +
                                    " ranks, but now there are " + std::to_string(members) +
                                    "; call jax.clear_caches() after init(), so that it is compiled again"};
}

CallStatus execute(XlaCallFrame& frame, bool on_gpu) {
  XlaCall call;
  if (CallStatus status = XlaCall::read(frame, call); !status.is_ok()) return status;
  const ProcessContext context;
  if (!context.get()) return not_initialised();
  if (CallStatus status = check_members(context.get(), call); !status.is_ok()) return status;
  if (on_gpu) return run_on_stream(context.get(), frame, std::move(call));
  return XlaPending::start(context.get(), *frame.api, std::move(call), frame.future);
}

template <int32_t minor>
bool answers_version_query(XlaCallFrame& frame) {
  if (!frame.extensions || frame.extensions->type != xla_metadata_extension) return false;
  XlaMetadata& metadata = *reinterpret_cast<XlaMetadataExtension*>(frame.extensions)->metadata;
  metadata.api_version.major_version = 0;
  metadata.api_version.minor_version = minor;
  metadata.traits = 0;
  return true;
}

// Handles a call. XLA rejects a handler that is older or newer than itself, so there is one handler for each version,
// which reports that version.
template <int32_t minor, bool on_gpu>
XlaError* handle(XlaCallFrame* frame) {
  if (answers_version_query<minor>(*frame) || frame->stage != XlaStage::execute) return nullptr;
  try {
    return to_xla(*frame->api, execute(*frame, on_gpu));
  } catch (const std::bad_alloc&) {
    return to_xla(*frame->api, {SRT_OUT_OF_MEMORY, "there is no memory left for a compiled program's call"});
  } catch (const std::exception& problem) {
    return to_xla(*frame->api,
                  {SRT_INTERNAL, std::string("unexpected in a compiled program's call: ") + problem.what()});
  }
}

template <bool on_gpu>
constexpr XlaHandler* handlers[] = {handle<1, on_gpu>, handle<2, on_gpu>, handle<newest_minor, on_gpu>};

}  // namespace
}  // namespace sirtaki::bindings

void* sirtaki_xla_handler(int32_t major, int32_t minor, int32_t on_gpu) {
  using namespace sirtaki::bindings;
  if (major != 0 || minor < 1) return nullptr;
  const int32_t known = std::min(minor, newest_minor) - 1;
  return reinterpret_cast<void*>(on_gpu ? handlers<true>[known] : handlers<false>[known]);
}
