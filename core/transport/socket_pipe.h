// One or several connected stream sockets (TCP or Unix) to one peer as a BytePipe. Over several, the stream is dealt
// out in stripes of one size, in turn, so that both ends know without a header which socket goes on.
#pragma once

#include <vector>

#include "base/descriptor.h"
#include "transport/link.h"

namespace sirtaki {

class SocketPipe final : public BytePipe {
 public:
  // Makes them non-blocking. If `probes_after` is not 0, an idle TCP peer's machine is asked for a sign of life then.
  SocketPipe(std::vector<Descriptor> sockets, Nanoseconds probes_after);
  ptrdiff_t write(std::span<const uint8_t> bytes, bool more) override;
  ptrdiff_t read(std::span<uint8_t> bytes) override;
  std::vector<int> descriptors() const override;
  void end_writing() override;
  bool is_delivered() const override;
  Nanoseconds silence() const override;

 private:
  // How far one direction of the stream has come.
  struct Place {
    size_t socket = 0;
    size_t left;  // bytes of the stripe
  };
  void advance(Place& place, size_t count) const;

  std::vector<Descriptor> sockets_;
  bool is_tcp_ = false;
  Place out_, in_;
};

}  // namespace sirtaki
