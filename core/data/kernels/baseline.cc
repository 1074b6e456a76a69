#include "data/kernels/body.h"
#include "data/kernels/wire.h"

namespace sirtaki {

const Kernels& baseline_kernels() {
  static constexpr Kernels table{"baseline", kernels_of, stream, wire_kernels_of};
  return table;
}

}  // namespace sirtaki
