// A byte ring in shared memory, with one writer and one reader per direction, as a BytePipe.
#pragma once

#include "transport/links/link.h"
#include "transport/memory/shared_region.h"

namespace sirtaki {

class RingPipe final : public BytePipe {
 public:
  RingPipe(const SharedRegion& region, int own_slot, int peer_slot)
      : out_(region.ring(own_slot, peer_slot)), in_(region.ring(peer_slot, own_slot)),
        out_data_(region.ring_data(own_slot, peer_slot)), in_data_(region.ring_data(peer_slot, own_slot)) {}

  ptrdiff_t write(std::span<const uint8_t> bytes, bool more) override;
  ptrdiff_t read(std::span<uint8_t> bytes) override;
  bool readable() const override;

 private:
  RingHeader& out_;
  RingHeader& in_;
  uint8_t* out_data_;
  const uint8_t* in_data_;
};

}  // namespace sirtaki
