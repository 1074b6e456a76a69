#include "data/single_rank_backend.h"

#include <cstring>

#include "data/packing.h"

namespace sirtaki {

std::unique_ptr<Operation> SingleRankBackend::start(TransferPtr transfer) {
  if (is_ragged(transfer->kind)) {
    copy_own(transfer->incoming[0], 0, transfer->incoming[0].bytes());
    return nullptr;
  }
  const ScatterList& list = traits(transfer->kind).output == Output::rows ? transfer->outgoing[0] : transfer->buffer;
  const bool scales = reduces(transfer->kind) && !(transfer->prescale.is_one() && transfer->postscale.is_one());
  const size_t element = transfer->element_bytes();
  list.visit(0, list.bytes(), [&](const uint8_t* input, uint8_t* output, int64_t, int64_t bytes) {
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
