#include "data/kernels/body.h"
#include "data/kernels/wire.h"

namespace sirtaki {

const Kernels& avx2_kernels() {
  static constexpr Kernels table{"avx2", kernels_of, stream, wire_kernels_of};
  return table;
}

}  // namespace sirtaki
