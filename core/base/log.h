// A log that writes straight to a descriptor, so that a stall report appears even while Python's GIL is held.
#pragma once

#include <string_view>

#include "base/text.h"

namespace sirtaki {

class Log {
 public:
  explicit Log(int descriptor) : descriptor_(descriptor) {}

  // Writes a line with one write(), so that lines of different ranks do not mix. Control characters are replaced.
  void line(std::string_view text) const;

 private:
  int descriptor_;
};

}  // namespace sirtaki
