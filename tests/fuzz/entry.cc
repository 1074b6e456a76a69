// One target as a libFuzzer program (https://llvm.org/docs/LibFuzzer.html): a check that fails aborts it.
#include <cstdlib>

#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sirtaki::fuzz::SIRTAKI_FUZZ_TARGET.run({data, size});
  if (check::failures()) std::abort();
  return 0;
}
