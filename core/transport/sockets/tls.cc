#include "transport/sockets/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/system/library.h"

namespace sirtaki {
namespace {

constexpr size_t record_bytes = 16 << 10;  // the maximum of bytes in a TLS record
constexpr size_t records_at_once = 7;      // encrypted before they are passed to the socket
constexpr size_t wire_bytes = 128 << 10;   // room for these records, including TLS's overhead for each
constexpr const char* libraries[] = {"libssl.so.3", "libssl.so.1.1"};
constexpr const char* advice =
    "; encryption needs OpenSSL 3 or 1.1.1: install it (Debian and Ubuntu: `apt install libssl3`; Fedora and RHEL: "
    "`dnf install openssl-libs`; conda: `conda install openssl`)";
// AES-128 first, because it is the fastest on processors with instructions for it.
constexpr const char* ciphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384";

#define SIRTAKI_FIND(member, symbol, result, parameters) library.find(#symbol, functions.member);
void find_functions(Library& library, OpensslFunctions& functions){SIRTAKI_OPENSSL_FUNCTIONS(SIRTAKI_FIND)}
#undef SIRTAKI_FIND

// Returns the oldest error of this thread and removes all errors, because other users of the library must not find
// them.
std::string take_words(const OpensslFunctions& functions) {
  const unsigned long number = functions.next_error();
  const char* words = number ? functions.error_words(number) : nullptr;
  functions.clear_errors();
  return words ? one_line(words) : "no reason was given";
}

}  // namespace

Status TlsIdentity::create(const char* library, std::shared_ptr<const TlsIdentity>& out) {
  std::shared_ptr<TlsIdentity> made(new TlsIdentity);
  SIRTAKI_TRY(made->open(library));
  SIRTAKI_TRY(made->make_certificate());
  out = std::move(made);
  return Status::ok();
}

TlsIdentity::~TlsIdentity() {
  if (context_) functions_.free_context(context_);
}

Status TlsIdentity::open(const char* name) {
  Library library(name ? name : libraries[0]);
  const std::string absence = library.is_open() ? std::string() : library.absence();
  if (!library.is_open() && !name) library = Library(libraries[1]);
  if (!library.is_open()) return {SRT_UNSUPPORTED, absence + advice};
  find_functions(library, functions_);
  return library.missing().empty() ? Status::ok() : Status(SRT_UNSUPPORTED, library.incompleteness() + advice);
}

Status TlsIdentity::make_certificate() {
  const OpensslFunctions& f = functions_;
  f.clear_errors();
  EvpKeyContext maker = f.new_key_context(evp_elliptic_curve, nullptr);
  X509Certificate certificate = f.new_certificate();
  EvpKey key = nullptr;
  unsigned bytes = 0;
  const bool made = maker && certificate && f.begin_key(maker) > 0 &&
                    f.set_key(maker, "ec_paramgen_curve", "P-256") > 0 && f.make_key(maker, &key) > 0 &&
                    sign_certificate(certificate, key) &&
                    f.digest(certificate, f.sha256(), fingerprint_.data(), &bytes) > 0 &&
                    bytes == fingerprint_.size() && (context_ = f.new_context(f.method())) != nullptr &&
                    f.use_certificate(context_, certificate) > 0 && f.use_key(context_, key) > 0 && configure();
  f.free_key(key);
  f.free_certificate(certificate);
  f.free_key_context(maker);
  if (!made) return {SRT_SYSTEM, "OpenSSL cannot make a certificate: " + take_words(f)};
  return Status::ok();
}

// Signs a certificate that is valid at all times, because its holder is identified by its fingerprint, and the clocks
// of hosts differ.
bool TlsIdentity::sign_certificate(X509Certificate certificate, EvpKey key) {
  const OpensslFunctions& f = functions_;
  const X509Name name = f.subject(certificate);
  const auto* own = reinterpret_cast<const unsigned char*>("sirtaki");
  return f.set_version(certificate, x509_version_3) > 0 && f.set_integer(f.serial_number(certificate), 1) > 0 &&
         f.set_time(f.begins(certificate), "19700101000000Z") > 0 &&
         f.set_time(f.ends(certificate), "99991231235959Z") > 0 &&
         f.add_name(name, "CN", asn1_ascii, own, -1, -1, 0) > 0 && f.set_issuer(certificate, name) > 0 &&
         f.set_public_key(certificate, key) > 0 && f.sign(certificate, key, f.sha256()) > 0;
}

// Allows only TLS 1.3, and nothing that outlives a connection.
bool TlsIdentity::configure() {
  functions_.set_options(context_, ssl_no_ticket);
  functions_.control(context_, ssl_ctrl_session_cache_mode, 0, nullptr);
  functions_.set_verify_mode(context_, ssl_verify_peer | ssl_verify_demand, nullptr);
  functions_.set_verify(context_, TlsSession::check_certificate, this);
  return functions_.control(context_, ssl_ctrl_least_version, tls_1_3, nullptr) > 0 &&
         functions_.control(context_, ssl_ctrl_greatest_version, tls_1_3, nullptr) > 0 &&
         functions_.set_tickets(context_, 0) > 0 && functions_.set_ciphersuites(context_, ciphers) > 0;
}

TlsSession::TlsSession(std::shared_ptr<const TlsIdentity> identity, int socket, const Fingerprint& peer,
                       uint64_t key_lasts)
    : identity_(std::move(identity)), functions_(identity_->functions()), socket_(socket), peer_(peer),
      key_lasts_(key_lasts) {}

Status TlsSession::open(std::shared_ptr<const TlsIdentity> identity, int socket, TlsRole role, const Fingerprint& peer,
                        std::unique_ptr<TlsSession>& out, uint64_t key_lasts) {
  std::unique_ptr<TlsSession> made(new TlsSession(std::move(identity), socket, peer, key_lasts));
  const OpensslFunctions& f = made->functions_;
  f.clear_errors();
  if (!(made->ssl_ = f.new_session(made->identity_->context())) || f.set_data(made->ssl_, 0, made.get()) <= 0 ||
      f.make_bio_pair(&made->inside_, wire_bytes, &made->wire_, wire_bytes) <= 0)
    return {SRT_SYSTEM, "OpenSSL cannot begin a connection: " + take_words(f)};
  f.set_bio(made->ssl_, made->inside_, made->inside_);
  if (role == TlsRole::accepts) f.accepts(made->ssl_);
  else f.connects(made->ssl_);
  out = std::move(made);
  return Status::ok();
}

TlsSession::~TlsSession() {
  if (ssl_) functions_.free_session(ssl_);
  if (wire_) functions_.free_bio(wire_);
}

int TlsSession::check_certificate(X509StoreContext shown, void* identity) {
  const OpensslFunctions& f = static_cast<const TlsIdentity*>(identity)->functions();
  auto* ssl = static_cast<Ssl>(f.verified(shown, f.verified_index()));
  auto* session = static_cast<TlsSession*>(f.data(ssl, 0));
  Fingerprint found{};
  unsigned bytes = 0;
  const X509Certificate certificate = f.shown_certificate(shown);
  const bool is_peer = certificate && f.digest(certificate, f.sha256(), found.data(), &bytes) > 0 &&
                       bytes == found.size() && found == session->peer_;
  session->has_wrong_certificate_ = !is_peer;
  return is_peer ? 1 : 0;
}

Status TlsSession::handshake() {
  for (;;) {
    functions_.clear_errors();
    const int result = functions_.handshake(ssl_);
    const int error = result == 1 ? 0 : functions_.error(ssl_, result);
    const std::string words = error && error != ssl_error_want_read ? take_words(functions_) : std::string();
    const Flow sent = send_out(false);  // an alert informs the other side of the failure
    if (has_wrong_certificate_)
      return {
          SRT_PROTOCOL,
          "the other side does not have the certificate that it proved to have with the job's key: something between "
          "the two hosts answers in its place"};
    if (!words.empty()) return {SRT_PROTOCOL, "TLS could not be agreed on: " + words};
    if (sent == Flow::ended) break;
    if (!error) return sent == Flow::moves ? Status::ok() : Status(SRT_IN_PROGRESS, "");
    const Flow came = take_in(functions_.bio_wants(wire_));
    if (came == Flow::ended) break;
    if (came == Flow::waits) return {SRT_IN_PROGRESS, ""};
  }
  return {SRT_PEER_LOST, "the other side closed the connection before TLS was agreed on"};
}

size_t TlsSession::unsent() const { return functions_.bio_pending(wire_); }

// Sends the encrypted bytes. `moves`: the socket has taken all of them.
TlsSession::Flow TlsSession::send_out(bool more) {
  char* from = nullptr;
  for (;;) {
    const int here = functions_.look_at_bio(wire_, &from);
    if (here <= 0) return Flow::moves;
    const bool is_last = static_cast<size_t>(here) == unsent();
    const int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (more || !is_last ? MSG_MORE : 0);
    const ssize_t count = ::send(socket_, from, static_cast<size_t>(here), flags);
    if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? Flow::waits : Flow::ended;
    functions_.take_from_bio(wire_, &from, static_cast<int>(count));
  }
}

// Reads from the socket, as much as there is room for.
TlsSession::Flow TlsSession::take_in(size_t most) {
  char* to = nullptr;
  const int room = functions_.room_in_bio(wire_, &to);
  if (room <= 0) return Flow::waits;
  const ssize_t count = ::recv(socket_, to, std::min(static_cast<size_t>(room), most), MSG_DONTWAIT);
  if (count == 0) return Flow::ended;
  if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? Flow::waits : Flow::ended;
  functions_.give_to_bio(wire_, &to, static_cast<int>(count));
  return Flow::moves;
}

// Encrypts at most one record, for which there is room.
bool TlsSession::encrypt(std::span<const uint8_t> bytes) {
  if (key_used_ >= key_lasts_) {
    if (functions_.update_key(ssl_, ssl_key_update_one_way) <= 0) return false;
    key_used_ = 0;
  }
  if (functions_.write(ssl_, bytes.data(), static_cast<int>(bytes.size())) != static_cast<int>(bytes.size()))
    return false;
  key_used_ += bytes.size();
  encrypted_ += bytes.size();
  return true;
}

ptrdiff_t TlsSession::write(std::span<const uint8_t> bytes, bool more) {
  if (unwritable_) return -1;
  functions_.clear_errors();
  size_t total = 0;
  for (;;) {
    const Flow sent = send_out(more || total + encrypted_ < bytes.size());
    if (sent == Flow::waits) break;
    unwritable_ = sent == Flow::ended;
    if (unwritable_) break;
    total += std::exchange(encrypted_, 0);
    if (total >= bytes.size()) break;
    for (size_t record = 0; record < records_at_once && total + encrypted_ < bytes.size() && !unwritable_; ++record) {
      const std::span<const uint8_t> rest = bytes.subspan(total + encrypted_);
      unwritable_ = !encrypt(rest.first(std::min(rest.size(), record_bytes)));
    }
    if (unwritable_) break;
  }
  if (unwritable_) functions_.clear_errors();
  return total || !unwritable_ ? static_cast<ptrdiff_t>(total) : -1;
}

ptrdiff_t TlsSession::read(std::span<uint8_t> bytes) {
  size_t total = 0;
  functions_.clear_errors();
  while (total < bytes.size() && !unreadable_) {
    const size_t most = std::min(bytes.size() - total, record_bytes);
    const int count = functions_.read(ssl_, bytes.data() + total, static_cast<int>(most));
    if (count > 0) {
      total += static_cast<size_t>(count);
      continue;
    }
    const bool wants_more = functions_.error(ssl_, count) == ssl_error_want_read;
    const Flow came = wants_more ? take_in(wire_bytes) : Flow::ended;
    if (came == Flow::waits) break;
    unreadable_ = came == Flow::ended;
  }
  if (unreadable_) functions_.clear_errors();
  return total || !unreadable_ ? static_cast<ptrdiff_t>(total) : -1;
}

size_t TlsSession::unread() const {
  return static_cast<size_t>(functions_.pending(ssl_)) + functions_.bio_pending(inside_);
}

// Ends the stream. A lost close_notify does no harm, because the last frame of a link is marked as the last.
void TlsSession::end_writing() {
  if (unwritable_) return;
  functions_.clear_errors();
  functions_.close_notify(ssl_);
  functions_.clear_errors();
  send_out(false);
}

}  // namespace sirtaki
