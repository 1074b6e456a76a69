// The ended operations of this rank by kind and backend, and the bytes of its tensors in their plans.
#pragma once

#include <array>
#include <cstdint>

#include "data/operation.h"
#include "plan/kind.h"

namespace sirtaki {

class OperationCounts {
 public:
  struct Count {
    int64_t operations = 0, failed = 0;  // failed ones among these
    int64_t bytes = 0;
    const char* algorithm = "";  // of the last one that moved bytes
  };

  Count& of(Kind kind, BackendName backend) { return counts_[static_cast<size_t>(kind)][static_cast<size_t>(backend)]; }

  // Calls visit(kind, backend, count) for each count that is not 0.
  template <typename Visit>
  void visit(Visit&& visit_count) const {
    for (size_t kind = 0; kind < kind_count; ++kind)
      for (size_t backend = 0; backend < backend_names.size(); ++backend)
        if (const Count& count = counts_[kind][backend]; count.operations || count.bytes)
          visit_count(static_cast<Kind>(kind), static_cast<BackendName>(backend), count);
  }

 private:
  std::array<std::array<Count, backend_names.size()>, kind_count> counts_{};
};

}  // namespace sirtaki
