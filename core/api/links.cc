// The C functions for the links of a rank.
#include "api/handles.h"
#include "base/give.h"

using namespace sirtaki;

extern "C" {

int32_t srt_first_links(const srt_context* c, int32_t* out, int32_t capacity) {
  int32_t count = 0;
  std::ignore = guarded(nullptr, [&] {
    const std::vector<int32_t> peers = c->context->first_links();
    count = give(peers, out, capacity);
    return Status::ok();
  });
  return count;
}
void srt_allow_link_requests(srt_context* c) { c->context->allow_link_requests(); }

srt_status srt_link_socket(srt_context* c, int32_t peer, int32_t fd, srt_error* error) {
  return guarded(error, [&] { return c->context->link_socket(peer, fd); });
}
srt_status srt_link_tls(srt_context* c, int32_t peer, int32_t fd, srt_tls_session* s, srt_error* error) {
  const srt_status status = guarded(error, [&] { return c->context->link_tls(peer, fd, s->session); });
  if (status == SRT_OK) delete s;
  return status;
}
srt_status srt_link_memory(srt_context* c, const srt_memory* memory, srt_error* error) {
  return guarded(error, [&] { return c->context->link_memory(*memory); });
}
srt_status srt_link_mpi(srt_context* c, const int32_t* peers, int32_t count, const srt_mpi* mpi, srt_error* error) {
  return guarded(error, [&] { return c->context->link_mpi(*mpi, {peers, static_cast<size_t>(count)}); });
}

srt_status srt_wait_link_requests(srt_context* c, int32_t* out, int32_t capacity, int32_t* count, int32_t timeout_ms) {
  return guarded(nullptr,
                 [&] { return c->context->wait_for_link_requests(out, capacity, *count, milliseconds(timeout_ms)); });
}
void srt_fail_link(srt_context* c, int32_t peer, const char* text) {
  std::ignore = guarded(nullptr, [&] {
    c->context->fail_link(peer, text);
    return Status::ok();
  });
}

}  // extern "C"
