#include "base/log.h"

#include <unistd.h>

#include <string>

namespace sirtaki {

void Log::line(std::string_view text) const {
  if (descriptor_ < 0) return;
  const std::string whole = "sirtaki: " + printable(text, 8'000) + "\n";
  // A log line that cannot be written has nobody to be told to.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_, whole.data(), whole.size());
}

}  // namespace sirtaki
