// All-reduce by pairwise exchange of the elements as they are. Slices are added in rank order, so the bits are those of
// an all-reduce through shared memory.
#include "data/links/pairwise_allreduce.h"

namespace sirtaki {
namespace {

class DirectAllreduce final : public PairwiseAllreduce {
 public:
  DirectAllreduce(const LinkSetting& setting, TransferPtr t)
      : PairwiseAllreduce(setting, std::move(t), setting.chunk_bytes) {}

  const char* algorithm() const override { return "direct"; }

 private:
  void send_slice(size_t member, int64_t tag, const Part& part) override {
    send_inputs(member, tag, transfer().buffer, part.begin, part.end);
  }

  void reduce_slice(std::span<const uint8_t* const> bodies, const Part& part) override {
    reduce(bodies, transfer().buffer, part.begin, part.end, scratch_);
  }

  void send_result(size_t member, int64_t tag, const Part& part) override {
    send_results(member, tag, transfer().buffer, part.begin, part.end, scratch_.data());
  }

  Status take_result(size_t member, int64_t tag, const Part& part, bool& is_here) override {
    return take(member, tag, transfer().buffer, part.begin, part.end, is_here);
  }

  std::vector<uint8_t> scratch_;  // for this rank's slice, if it has no contiguous output
};

}  // namespace

std::unique_ptr<Operation> make_direct_allreduce(const LinkSetting& setting, TransferPtr transfer) {
  return std::make_unique<DirectAllreduce>(setting, std::move(transfer));
}

}  // namespace sirtaki
