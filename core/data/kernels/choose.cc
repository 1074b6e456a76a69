#include "data/kernels/kernels.h"

#ifdef SIRTAKI_HAVE_AVX2
#include <cpuid.h>
#endif

namespace sirtaki {

const Kernels& choose_kernels([[maybe_unused]] std::string_view wish) {
#ifdef SIRTAKI_HAVE_AVX2
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);  // clang 14's __builtin_cpu_supports does not know "f16c"
  if (wish != "baseline" && __builtin_cpu_supports("avx2") && ecx & bit_F16C) return avx2_kernels();
#endif
  return baseline_kernels();
}

}  // namespace sirtaki
