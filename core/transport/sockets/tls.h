// TLS 1.3 on a connected stream socket, by OpenSSL, which is opened at run time. Each process generates its own
// certificate; both sides of a connection have received the fingerprint of the other's certificate beforehand, and
// accept no other one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "transport/sockets/openssl.h"

namespace sirtaki {

using Fingerprint = std::array<uint8_t, 32>;  // SHA-256 of a certificate, in DER

// The certificate of this process, its key, and the library that uses them. Safe for use by several threads.
class TlsIdentity {
 public:
  // `library`: the file name of libssl; nullptr: libssl.so.3, or else libssl.so.1.1.
  static Status create(const char* library, std::shared_ptr<const TlsIdentity>& out);
  ~TlsIdentity();
  TlsIdentity(const TlsIdentity&) = delete;

  const Fingerprint& fingerprint() const { return fingerprint_; }
  const OpensslFunctions& functions() const { return functions_; }
  SslContext context() const { return context_; }

 private:
  TlsIdentity() = default;
  Status open(const char* library);
  Status make_certificate();
  bool sign_certificate(X509Certificate certificate, EvpKey key);
  bool configure();

  OpensslFunctions functions_;
  SslContext context_ = nullptr;
  Fingerprint fingerprint_{};
};

enum class TlsRole { connects, accepts };

// One connection. It must be used by one thread at a time, and never blocks, raises a signal or closes its socket.
class TlsSession {
 public:
  // The number of bytes after which the keys change: AES-GCM is safe for 2^24.5 records of 16 KiB (RFC 8446, 5.5).
  static constexpr uint64_t bytes_per_key = uint64_t{64} << 30;

  static Status open(std::shared_ptr<const TlsIdentity> identity, int socket, TlsRole role, const Fingerprint& peer,
                     std::unique_ptr<TlsSession>& out, uint64_t key_lasts = bytes_per_key);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;

  // Continues the handshake, without reading anything beyond it from the socket. SRT_IN_PROGRESS: call again when the
  // socket is readable, or writable if wants_write(). SRT_PEER_LOST: the other side has closed the connection.
  Status handshake();
  bool wants_write() const { return unsent() > 0; }

  // Write and read like a BytePipe. Bytes count as written once the socket has taken them; until then the next call
  // must begin with the same bytes. The stream ends at end-of-stream, with or without TLS's close_notify.
  ptrdiff_t write(std::span<const uint8_t> bytes, bool more);
  ptrdiff_t read(std::span<uint8_t> bytes);
  size_t unread() const;  // bytes taken from the socket that were not read yet; some may be TLS's own
  // Returns whether a read may return what the socket no longer shows: bytes, or the end of the stream.
  bool holds_inbound() const { return unread() > 0 || unreadable_; }
  void end_writing();

 private:
  friend class TlsIdentity;
  TlsSession(std::shared_ptr<const TlsIdentity> identity, int socket, const Fingerprint& peer, uint64_t key_lasts);
  static int check_certificate(X509StoreContext shown, void* identity);
  size_t unsent() const;
  enum class Flow { moves, waits, ended };
  Flow send_out(bool more);
  Flow take_in(size_t most);
  bool encrypt(std::span<const uint8_t> bytes);

  std::shared_ptr<const TlsIdentity> identity_;
  const OpensslFunctions& functions_;
  int socket_;
  Fingerprint peer_;
  Ssl ssl_ = nullptr;
  SslBio inside_ = nullptr, wire_ = nullptr;  // encrypted bytes, as OpenSSL and as the socket see them
  size_t encrypted_ = 0;                      // how many of the bytes to be written next wait for the socket
  uint64_t key_lasts_, key_used_ = 0;
  bool has_wrong_certificate_ = false;  // the peer has presented another certificate
  bool unreadable_ = false, unwritable_ = false;
};

}  // namespace sirtaki
