// One or more connections to one peer, encrypted with TLS, as a BytePipe.
#pragma once

#include <memory>

#include "base/system/descriptor.h"
#include "transport/sockets/striped_pipe.h"
#include "transport/sockets/tls.h"

namespace sirtaki {

// A connection whose handshake is complete.
class TlsChannel {
 public:
  static constexpr bool is_encrypted = true;

  TlsChannel(Descriptor socket, std::unique_ptr<TlsSession> session)
      : socket_(std::move(socket)), session_(std::move(session)) {}

  int socket() const { return socket_.get(); }
  ptrdiff_t write(std::span<const uint8_t> bytes, bool more) { return session_->write(bytes, more); }
  ptrdiff_t read(std::span<uint8_t> bytes) { return session_->read(bytes); }
  bool holds_inbound() const { return session_->holds_inbound(); }
  void end_writing() { session_->end_writing(); }

 private:
  Descriptor socket_;
  std::unique_ptr<TlsSession> session_;
};

using TlsPipe = StripedPipe<TlsChannel>;

}  // namespace sirtaki
