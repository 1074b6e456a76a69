// The C functions for memory that the ranks of a host share.
#include "api/handles.h"

struct srt_buffer {
  std::unique_ptr<sirtaki::SharedBuffer> buffer;
};

using namespace sirtaki;

extern "C" {

srt_buffer* srt_buffer_create(srt_context* c, int64_t bytes, srt_error* error) {
  std::unique_ptr<srt_buffer> made;
  const auto create = [&] {
    made = std::make_unique<srt_buffer>();
    return c->context->allocate_shared(bytes, made->buffer);
  };
  return guarded(error, create) == SRT_OK ? made.release() : nullptr;
}
uintptr_t srt_buffer_address(const srt_buffer* buffer) { return reinterpret_cast<uintptr_t>(buffer->buffer->data()); }
void srt_buffer_fork_child(srt_buffer* buffer) { buffer->buffer->fork_child(); }
void srt_buffer_destroy(srt_buffer* buffer) { delete buffer; }

}  // extern "C"
