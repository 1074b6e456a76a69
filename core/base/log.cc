#include "base/log.h"

#include <unistd.h>

#include <string>

namespace sirtaki {

void Log::line(std::string_view text) const {
  if (descriptor_ < 0) return;
  const std::string whole = "sirtaki: " + printable(text, 8'000) + "\n";
  // A failure to write the log cannot be reported anywhere.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_, whole.data(), whole.size());
}

}  // namespace sirtaki
