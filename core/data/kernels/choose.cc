#include "data/kernels/kernels.h"

namespace sirtaki {

const Kernels& choose_kernels([[maybe_unused]] std::string_view wish) {
#ifdef SIRTAKI_HAVE_AVX2
  if (wish != "baseline" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return avx2_kernels();
#endif
  return baseline_kernels();
}

}  // namespace sirtaki
