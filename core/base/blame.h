// Failures caused by another rank.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace sirtaki {

// Returns the failure attributed to the rank whose bytes caused it: with that rank's name in the text, and as
// culprit.
inline Status blame(const std::vector<std::string>& names, int32_t culprit, const Status& status) {
  const std::string& name = names[static_cast<size_t>(culprit)];
  return {status.code(), format("%s: %s", name.c_str(), status.text()), culprit};
}

}  // namespace sirtaki
