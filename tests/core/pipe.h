// A connection whose two ends are in one process; nothing moves unless a test makes it.
#pragma once

#include <algorithm>
#include <memory>

#include "base/codec.h"
#include "transport/links/link.h"

namespace world {

using namespace sirtaki;

// One end of a connection within this process.
class Pipe final : public BytePipe {
 public:
  Pipe(std::shared_ptr<Bytes> out, std::shared_ptr<Bytes> in) : out_(std::move(out)), in_(std::move(in)) {}

  ptrdiff_t write(std::span<const uint8_t> bytes, bool) override {
    out_->insert(out_->end(), bytes.begin(), bytes.end());
    return static_cast<ptrdiff_t>(bytes.size());
  }
  ptrdiff_t read(std::span<uint8_t> bytes) override {
    const auto count = static_cast<ptrdiff_t>(std::min(bytes.size(), in_->size()));
    std::copy_n(in_->begin(), count, bytes.begin());
    in_->erase(in_->begin(), in_->begin() + count);
    return count;
  }
  bool readable() const override { return !in_->empty(); }

 private:
  std::shared_ptr<Bytes> out_, in_;
};

}  // namespace world
