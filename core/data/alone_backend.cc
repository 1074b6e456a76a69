#include "data/alone_backend.h"

#include <cstring>

namespace sirtaki {

std::unique_ptr<Operation> AloneBackend::start(std::shared_ptr<const Transfer> transfer) {
  if (transfer->kind == Kind::allgather) {
    transfer->gathered[0].visit(0, transfer->gathered[0].bytes(),
                                [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
      if (input && output) std::memcpy(output, input, static_cast<size_t>(bytes));
    });
    return nullptr;
  }
  const bool reduces = transfer->kind == Kind::allreduce;
  const bool scales = reduces && !(transfer->prescale.is_one() && transfer->postscale.is_one());
  const size_t element = transfer->element_bytes();
  transfer->buffer.visit(0, transfer->buffer.bytes(),
                         [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
    if (!input || !output) return;
    const auto count = static_cast<size_t>(bytes);
    if (scales) {
      const DTypeKernels& kernels = *kernels_.of(transfer->dtype);
      kernels.scale(output, input, count / element, transfer->prescale);
      kernels.scale(output, output, count / element, transfer->postscale);
    } else if (input != output) {
      std::memcpy(output, input, count);
    }
  });
  return nullptr;
}

}  // namespace sirtaki
