// Frames from arbitrary bytes: they are the same whatever pieces they arrive in, and no frame holds more than has
// arrived.
#include <algorithm>

#include "targets.h"
#include "transport/links/link.h"

namespace sirtaki::fuzz {
namespace {

// A pipe that delivers the input in pieces of one size, and accepts what is written.
class MemoryPipe final : public BytePipe {
 public:
  MemoryPipe(Input input, size_t piece, Bytes* written = nullptr) : rest_(input), piece_(piece), written_(written) {}

  ptrdiff_t write(std::span<const uint8_t> bytes, bool) override {
    const size_t count = std::min(bytes.size(), piece_);
    if (written_) written_->insert(written_->end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count));
    return static_cast<ptrdiff_t>(count);
  }

  ptrdiff_t read(std::span<uint8_t> bytes) override {
    if (rest_.empty()) return -1;
    const size_t count = std::min({bytes.size(), rest_.size(), piece_});
    std::copy_n(rest_.begin(), count, bytes.begin());
    rest_ = rest_.subspan(count);
    return static_cast<ptrdiff_t>(count);
  }

 private:
  Input rest_;
  size_t piece_;
  Bytes* written_;
};

struct Heard {
  bool operator==(const Heard&) const = default;

  Bytes frames;  // headers and bodies, one after another
  srt_status status = SRT_OK;
};

Heard hear(Input input, size_t piece) {
  Link link(std::make_unique<MemoryPipe>(input, piece));
  Heard heard;
  while (heard.status == SRT_OK) {
    const Frame* frame = nullptr;
    heard.status = link.front(frame).code();
    if (frame) {
      const auto* header = reinterpret_cast<const uint8_t*>(&frame->header);
      heard.frames.insert(heard.frames.end(), header, header + sizeof frame->header);
      heard.frames.insert(heard.frames.end(), frame->body.begin(), frame->body.end());
      link.pop();
    } else if (heard.status == SRT_OK && !link.receive()) {
      break;
    }
  }
  return heard;
}

void receive_frames(Input input) {
  Slices slices(input);
  const size_t piece = slices.byte() + size_t{1};
  const Input rest = input.subspan(std::min<size_t>(input.size(), 1));
  const Heard heard = hear(rest, rest.size() + 1);
  CHECK(heard.frames.size() <= rest.size());
  CHECK(hear(rest, piece) == heard);
}

std::vector<Bytes> link_seeds() {
  Bytes seed{5};
  Link link(std::make_unique<MemoryPipe>(Input{}, 1'000, &seed));
  link.send({.kind = FrameKind::report}, Bytes(3, 1));
  link.send({.kind = FrameKind::data, .step = 2, .plan = 7}, Bytes(40, 2));
  link.send({.kind = FrameKind::goodbye}, {});
  while (link.flush()) {
  }
  return {seed};
}

}  // namespace

const Target link{"link", receive_frames, link_seeds};

}  // namespace sirtaki::fuzz
