// The status type of all layers: an error code, and a message for the user.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "sirtaki.h"

namespace sirtaki {

// A code, a text and a culprit. No text is allocated for ok, which keeps it cheap.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // Creates a status. `culprit` is the rank whose bytes caused the failure; -1: this rank.
  Status(srt_status code, std::string text, int32_t culprit = -1)
      : code_(code), culprit_(culprit), text_(std::make_shared<const std::string>(std::move(text))) {}

  static Status ok() { return {}; }

  bool is_ok() const { return code_ == SRT_OK; }
  explicit operator bool() const = delete;  // "if (status)" is ambiguous: use is_ok()
  srt_status code() const { return code_; }
  const char* text() const { return text_ ? text_->c_str() : ""; }
  int32_t culprit() const { return culprit_; }

 private:
  srt_status code_ = SRT_OK;
  int32_t culprit_ = -1;
  std::shared_ptr<const std::string> text_;
};

// The table of all codes, for messages and for the bindings' exception classes.
struct StatusTable {
  static int count();
  static const srt_status_entry* entry(int index);  // nullptr out of range
  static const char* name(srt_status code);
  static bool is_fatal(srt_status code);
};

// Formats in printf style, because <format> is missing from GCC 12.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Returns the status of a system call that has just failed, with the reason in errno.
Status system_call_failed(const char* call);

}  // namespace sirtaki

// Returns from the function with the status of an expression that failed.
#define SIRTAKI_TRY(expression)                                                     \
  do {                                                                              \
    if (::sirtaki::Status status_ = (expression); !status_.is_ok()) return status_; \
  } while (false)
