// Both ends of an encrypted connection in one process.
#pragma once

#include <memory>
#include <string>

#include "check.h"
#include "transport/sockets/tls_channel.h"

namespace sirtaki {

inline void expect_ok(const Status& status) { CHECK_EQUAL(std::string(status.text()), ""); }

using ::contains;
inline bool contains(const Status& status, const std::string& part) { return ::contains(status.text(), part); }

}  // namespace sirtaki

namespace encrypted {

using namespace sirtaki;

inline std::shared_ptr<const TlsIdentity> identity() {
  std::shared_ptr<const TlsIdentity> made;
  if (const Status status = TlsIdentity::create(nullptr, made); !status.is_ok())
    check::fail(__FILE__, __LINE__, status.text());
  return made;
}

// Two sessions at the ends of a connection; the first one connects.
struct Sessions {
  std::unique_ptr<TlsSession> ends[2];
};

struct Ends {
  int sockets[2];
  uint64_t key_lasts = TlsSession::bytes_per_key;
};

inline Sessions begin(const Ends& on) {
  Sessions made;
  const auto first = identity(), second = identity();
  const bool begun =
      TlsSession::open(first, on.sockets[0], TlsRole::connects, second->fingerprint(), made.ends[0], on.key_lasts)
          .is_ok() &&
      TlsSession::open(second, on.sockets[1], TlsRole::accepts, first->fingerprint(), made.ends[1], on.key_lasts)
          .is_ok();
  if (!begun) check::fail(__FILE__, __LINE__, "no session");
  return made;
}

// Runs both sides' handshakes, in turn, until both are over.
inline void shake_hands(Sessions& between, Status (&results)[2]) {
  results[0] = results[1] = Status(SRT_IN_PROGRESS, "");
  while (results[0].code() == SRT_IN_PROGRESS || results[1].code() == SRT_IN_PROGRESS)
    for (int end : {0, 1}) {
      if (results[end].code() == SRT_IN_PROGRESS) results[end] = between.ends[end]->handshake();
      if (!results[end].is_ok() && results[end].code() != SRT_IN_PROGRESS) return;
    }
}

inline Sessions establish(const Ends& on) {
  Sessions made = begin(on);
  Status results[2];
  shake_hands(made, results);
  for (const Status& result : results)
    if (!result.is_ok()) check::fail(__FILE__, __LINE__, result.text());
  return made;
}

}  // namespace encrypted
