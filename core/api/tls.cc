// The C functions for encrypted connections.
#include <algorithm>

#include "api/handles.h"

struct srt_tls {
  std::shared_ptr<const sirtaki::TlsIdentity> identity;
};

using namespace sirtaki;

extern "C" {

srt_tls* srt_tls_create(const char* library, srt_error* error) {
  auto made = std::make_unique<srt_tls>();
  return guarded(error, [&] { return TlsIdentity::create(library, made->identity); }) == SRT_OK ? made.release()
                                                                                                : nullptr;
}
void srt_tls_fingerprint(const srt_tls* tls, uint8_t* out) { std::ranges::copy(tls->identity->fingerprint(), out); }
void srt_tls_destroy(srt_tls* tls) { delete tls; }

srt_tls_session* srt_tls_open(const srt_tls* tls, int32_t fd, int32_t accepts, const uint8_t* peer, srt_error* error) {
  auto made = std::make_unique<srt_tls_session>();
  Fingerprint fingerprint;
  std::copy_n(peer, fingerprint.size(), fingerprint.begin());
  const TlsRole role = accepts ? TlsRole::accepts : TlsRole::connects;
  const srt_status status =
      guarded(error, [&] { return TlsSession::open(tls->identity, fd, role, fingerprint, made->session); });
  return status == SRT_OK ? made.release() : nullptr;
}
srt_status srt_tls_handshake(srt_tls_session* s, srt_error* error) {
  return guarded(error, [&] { return s->session->handshake(); });
}
int32_t srt_tls_wants_write(const srt_tls_session* s) { return s->session->wants_write() ? 1 : 0; }
int64_t srt_tls_write(srt_tls_session* s, const void* from, int64_t bytes) {
  return s->session->write({static_cast<const uint8_t*>(from), static_cast<size_t>(bytes)}, false);
}
int64_t srt_tls_read(srt_tls_session* s, void* to, int64_t bytes) {
  return s->session->read({static_cast<uint8_t*>(to), static_cast<size_t>(bytes)});
}
int64_t srt_tls_unread(const srt_tls_session* s) { return static_cast<int64_t>(s->session->unread()); }
void srt_tls_close(srt_tls_session* s) { delete s; }

}  // extern "C"
