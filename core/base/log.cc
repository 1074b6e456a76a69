#include "base/log.h"

#include <unistd.h>

namespace sirtaki {

std::string printable(std::string_view text, size_t limit) {
  std::string clean(text.substr(0, limit));
  for (char& c : clean)
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f) c = '?';
  return clean;
}

void Log::line(std::string_view text) const {
  if (descriptor_ < 0) return;
  const std::string whole = "sirtaki: " + printable(text, 8'000) + "\n";
  // A log line that cannot be written has nobody to be told to.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_, whole.data(), whole.size());
}

}  // namespace sirtaki
