#include "data/kernels/body.h"

namespace sirtaki {

const Kernels& baseline_kernels() {
  static constexpr Kernels table{"baseline", kernels_of, stream};
  return table;
}

}  // namespace sirtaki
