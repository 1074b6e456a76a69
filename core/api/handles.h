// Definitions shared by the files of C functions: the context that the C handle points to, and the conversion of
// exceptions to statuses.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string_view>

#include "base/status.h"
#include "context/context.h"
#include "sirtaki.h"
#include "transport/sockets/tls.h"

struct srt_context {
  std::unique_ptr<sirtaki::Context> context;
};

struct srt_tls_session {
  std::unique_ptr<sirtaki::TlsSession> session;
};

namespace sirtaki {

inline srt_status give(const Status& status, srt_error* error) {
  if (error) {
    error->status = status.code();
    const size_t length = std::string_view(status.text()).copy(error->text, sizeof error->text - 1);
    error->text[length] = '\0';
  }
  return status.code();
}

// Calls a function and converts any exception to a status; in practice, only std::bad_alloc occurs.
template <typename Call>
srt_status guarded(srt_error* error, Call&& call) {
  try {
    return give(call(), error);
  } catch (const std::bad_alloc&) {
    return give({SRT_OUT_OF_MEMORY, "there is no memory left"}, error);
  } catch (const std::exception& problem) {
    return give({SRT_INTERNAL, format("unexpected: %s", problem.what())}, error);
  }
}

}  // namespace sirtaki
