// A connected stream socket (TCP or Unix) as a BytePipe.
#pragma once

#include "base/descriptor.h"
#include "transport/link.h"

namespace sirtaki {

class SocketPipe final : public BytePipe {
 public:
  explicit SocketPipe(Descriptor socket);  // makes it non-blocking
  ptrdiff_t write(std::span<const uint8_t> bytes) override;
  ptrdiff_t read(std::span<uint8_t> bytes) override;
  int descriptor() const override { return socket_.get(); }

 private:
  Descriptor socket_;
};

}  // namespace sirtaki
