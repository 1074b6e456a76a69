// Requests with a wire format: the ranks agree on it, and what cannot be encoded is refused.
#include "world.h"

using namespace world;

namespace {

// A backend that serves GPUs, and is never started.
class UnusedDevices final : public Backend {
 public:
  BackendName name(const Transfer&) const override { return BackendName::staged; }
  bool serves(const Transfer& transfer) const override { return transfer.device >= 0; }
  std::unique_ptr<Operation> start(TransferPtr) override { return nullptr; }
  unsigned needs(const Transfer&) const override { return needs_nothing; }
};

// Returns the text with which a world of one rank refuses a sum in the format int8, after a change.
std::string refusal(void (*change)(srt_request&)) {
  Options options = over(Over::sockets);
  options.prepare = [](int, Context& context) { context.add_backend(std::make_unique<UnusedDevices>()); };
  World ranks(1, options);
  FloatSum sum("x");
  sum.request.wire_format = SRT_WIRE_INT8;
  change(sum.request);
  Ticket handle = 0;
  const Status status = ranks[0].enqueue(&sum.request, 1, &handle);
  CHECK(!status.is_ok());
  return status.text();
}

}  // namespace

TEST(an_unknown_format_is_refused) {
  CHECK_EQUAL(refusal([](srt_request& r) { r.wire_format = 9; }), "'x': there is no wire format 9");
  CHECK_EQUAL(refusal([](srt_request& r) { r.wire_format = -1; }), "'x': there is no wire format -1");
}

TEST(only_sums_of_floats_on_the_cpu_are_encoded) {
  const std::string usual =
      "'x': the wire format int8 is for sums and averages of float32 by an all-reduce, and this is ";
  CHECK_EQUAL(refusal([](srt_request& r) { r.dtype = static_cast<int32_t>(DType::bfloat16); }),
              usual + "an all-reduce of bfloat16 with the reduce op sum");
  CHECK_EQUAL(refusal([](srt_request& r) { r.reduce_op = SRT_MAX; }),
              usual + "an all-reduce of float32 with the reduce op max");
  CHECK_EQUAL(refusal([](srt_request& r) { r.reduce_op = SRT_ADASUM; }),
              usual + "an all-reduce of float32 with the reduce op adasum");
  CHECK_EQUAL(refusal([](srt_request& r) { r.kind = SRT_BROADCAST; }), usual + "a broadcast of float32");
  CHECK_EQUAL(refusal([](srt_request& r) {
    r.kind = SRT_REDUCESCATTER;
    static std::vector<float> rows(10);
    r.output = reinterpret_cast<uintptr_t>(rows.data());
  }),
              usual + "a reduce-scatter of float32 with the reduce op sum");
  CHECK_EQUAL(refusal([](srt_request& r) { r.device = 0; }),
              "'x': the wire format int8 is for tensors on the CPU, and this one is on GPU 0; send it without a wire "
              "format, or copy it to the CPU first");
}

TEST(ranks_must_agree_on_the_format) {
  for (const Options& options : everywhere(3)) {
    World ranks(3, options);
    ranks.run([](int rank, Context& context) {
      FloatSum sum("x", 10, 1);
      sum.request.wire_format = rank == 2 ? SRT_WIRE_FP8 : SRT_WIRE_INT8;
      const Status status = end_of(context, sum.request);
      CHECK_EQUAL(status.code(), SRT_MISMATCH);
      CHECK_EQUAL(std::string(status.text()),
                  "ranks disagree about 'x': rank 0 (pid 100 on here), rank 1 (pid 101 on here) have the wire format "
                  "int8, rank 2 (pid 102 on here) has the wire format fp8; every rank must pass the same wire format, "
                  "or compression");
      sum.request.wire_format = SRT_WIRE_INT8;
      run_well(context, sum.request);  // the world goes on
      CHECK_EQUAL(sum.data, std::vector<float>(10, 3));
    });
  }
}
