#include "data/kernels/body.h"

namespace sirtaki {

const Kernels& avx2_kernels() {
  static constexpr Kernels table{"avx2", kernels_of, stream};
  return table;
}

}  // namespace sirtaki
