// All-reduce by pairwise exchange in a wire format with blocks (base/dtypes/wire_format.h). Slices are summed in rank
// order. A rank also encodes and decodes its own part of a sum, so that all parts are treated equally, and its own
// result, so that all ranks get the same bits. An element is rounded twice: when it is sent, and when the sum is.
//
// Slices are cut where blocks begin. What a tensor's elements become depends on neither the number of their owner nor
// the tensors in the same buffer.
#include <algorithm>

#include "data/links/pairwise_allreduce.h"
#include "data/links/wire_blocks.h"

namespace sirtaki {
namespace {

constexpr int64_t most_raw_bytes = 16 * WireBlocks::block_bytes;  // worked on at a time, in the first-level cache
constexpr size_t most_elements = static_cast<size_t>(most_raw_bytes) / sizeof(float);

// Returns how many bytes of a slice have about a chunk's bytes in a frame. A slice of the smallest tensors, which have
// a scale for each element, still fits into a frame.
int64_t slice_bytes(int64_t chunk_bytes) { return std::min<int64_t>(chunk_bytes * sizeof(float), longest_frame / 2); }

class QuantisedAllreduce final : public PairwiseAllreduce {
 public:
  QuantisedAllreduce(const LinkSetting& setting, TransferPtr t)
      : PairwiseAllreduce(setting, std::move(t), slice_bytes(setting.chunk_bytes)), blocks_(transfer().buffer) {}

  const char* algorithm() const override { return "quantised"; }

 private:
  int64_t border(int64_t position) const override { return blocks_.border(position); }
  int64_t wire_bytes(const Part& part) const override { return blocks_.encoded_bytes(part.begin, part.end); }

  // Calls a function for parts of tensors that begin with a block and have at most most_elements: with the input,
  // the output, the position in the buffer, and the number of elements.
  template <typename Visit>
  void visit_blocks(const Part& part, Visit&& visit) const {
    transfer().buffer.visit(part.begin, part.end,
                            [&](const uint8_t* input, uint8_t* output, int64_t offset, int64_t bytes) {
      for (int64_t at = 0; at < bytes; at += most_raw_bytes)
        visit(input ? input + at : nullptr, output ? output + at : nullptr, part.begin + offset + at,
              static_cast<size_t>(std::min(most_raw_bytes, bytes - at)) / sizeof(float));
    });
  }

  // Encodes this rank's prescaled input at a position in the buffer.
  void encode_input(const uint8_t* input, int64_t position, size_t elements, uint8_t* out) {
    const auto* values = reinterpret_cast<const float*>(input);
    if (!input || !transfer().prescale.is_one()) {
      const auto bytes = static_cast<int64_t>(elements * sizeof(float));
      pack_bytes(transfer().buffer, position, position + bytes, reinterpret_cast<uint8_t*>(packed_));
      values = packed_;
    }
    wire_kernels().encode(out, values, elements);
  }

  std::span<uint8_t> compose_counted(size_t member, int64_t tag, const Part& part) {
    const int64_t encoded = wire_bytes(part);
    if (WireBytes* counted = transfer().wire_bytes) {
      counted->encoded += encoded;
      counted->unencoded += part.end - part.begin;
    }
    return compose(member, tag, encoded);
  }

  void send_slice(size_t member, int64_t tag, const Part& part) override {
    uint8_t* out = compose_counted(member, tag, part).data();
    visit_blocks(part, [&](const uint8_t* input, uint8_t*, int64_t position, size_t elements) {
      encode_input(input, position, elements, out);
      out += encoded_size(elements);
    });
  }

  // Keeps the sum in `result_`, and writes what other ranks will decode to the outputs.
  void reduce_slice(std::span<const uint8_t* const> bodies, const Part& part) override {
    result_.resize(static_cast<size_t>(wire_bytes(part)));
    size_t done = 0;  // encoded bytes
    visit_blocks(part, [&](const uint8_t* input, uint8_t* output, int64_t position, size_t elements) {
      encode_input(input, position, elements, encoded_);
      for (size_t member = 0; member < member_count(); ++member) {
        const uint8_t* from = member == transfer().own ? encoded_ : bodies[member] + done;
        (member == 0 ? wire_kernels().decode : wire_kernels().add)(sums_, from, elements);
      }
      if (!transfer().postscale.is_one()) arithmetic().scale(sums_, sums_, elements, transfer().postscale);
      wire_kernels().encode(result_.data() + done, sums_, elements);
      if (output) wire_kernels().decode(reinterpret_cast<float*>(output), result_.data() + done, elements);
      done += encoded_size(elements);
    });
  }

  void send_result(size_t member, int64_t tag, const Part& part) override {
    std::copy(result_.begin(), result_.end(), compose_counted(member, tag, part).begin());
  }

  Status take_result(size_t member, int64_t tag, const Part& part, bool& is_here) override {
    std::span<const uint8_t> body;
    SIRTAKI_TRY(arrived(member, tag, wire_bytes(part), body));
    is_here = body.data() != nullptr;
    if (!is_here) return Status::ok();
    const uint8_t* from = body.data();
    visit_blocks(part, [&](const uint8_t*, uint8_t* output, int64_t, size_t elements) {
      if (output) wire_kernels().decode(reinterpret_cast<float*>(output), from, elements);
      from += encoded_size(elements);
    });
    consume(member);
    return Status::ok();
  }

  WireBlocks blocks_;
  std::vector<uint8_t> result_;  // of this rank's slice, encoded
  alignas(64) float packed_[most_elements];
  alignas(64) float sums_[most_elements];
  uint8_t encoded_[encoded_size(most_elements)];
};

}  // namespace

std::unique_ptr<Operation> make_quantised_allreduce(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<QuantisedAllreduce>(setting, std::move(transfer));
}

}  // namespace sirtaki
