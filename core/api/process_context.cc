// The process's context, for callers that have no context at hand: operations inside programs that a framework has
// compiled.
#include <mutex>
#include <shared_mutex>

#include "sirtaki.h"

namespace {

// The only global state. A shared lock keeps the context alive while a call uses it.
constinit std::shared_mutex in_use;
constinit srt_context* process_context = nullptr;

}  // namespace

extern "C" {

void srt_set_process_context(srt_context* context) {
  const std::unique_lock lock(in_use);
  process_context = context;
}
srt_context* srt_acquire_process_context(void) {
  in_use.lock_shared();
  srt_context* held = process_context;
  if (!held) in_use.unlock_shared();
  return held;
}
void srt_release_process_context(void) { in_use.unlock_shared(); }

}  // extern "C"
