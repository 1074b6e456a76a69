#include "tensorflow/world.h"

#include <cstring>
#include <functional>
#include <vector>

#include "native/requests.h"
#include "sirtaki.h"
#include "tensorflow/done.h"
#include "tensorflow/owned.h"

namespace sirtaki::tensorflow {
namespace {

using Numbers = std::vector<int32_t>;

// Writes the numbers that `ask` reads from the process's context to output 0.
void answer(TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* callback,
            const std::function<Numbers(srt_context*, KeptStatus&)>& ask) {
  const Done done(callback);
  KeptStatus outcome;
  Numbers numbers;
  {
    const bindings::ProcessContext context;
    if (context.get()) numbers = ask(context.get(), outcome);
    else outcome.fail(bindings::not_initialised());
  }
  const auto count = static_cast<int64_t>(numbers.size());
  const size_t bytes = numbers.size() * sizeof(int32_t);
  if (outcome.is_ok()) {
    const Tensor output(tf().allocate_output(where, 0, type_int32, &count, 1, bytes, outcome.get()));
    if (output && bytes) std::memcpy(tf().tensor_data(output.get()), numbers.data(), bytes);
  }
  if (!outcome.is_ok()) tf().compute_failed(where, outcome.get());
  done();
}

}  // namespace

void compute_place(void*, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done) {
  answer(where, done, [](srt_context* context, KeptStatus&) -> Numbers {
    srt_topology place{};
    srt_get_topology(context, &place);
    return {place.rank, place.size, place.local_rank, place.local_size, place.cross_rank, place.cross_size};
  });
}

void compute_members(void*, TF_OpKernelContext* where, TF_AsyncOpKernelDoneCallback* done) {
  answer(where, done, [where](srt_context* context, KeptStatus& outcome) -> Numbers {
    TF_Tensor* given = nullptr;
    tf().input(where, 0, &given, outcome.get());
    const Tensor set(given);
    if (!outcome.is_ok()) return {};
    int32_t number = -1;
    if (tf().tensor_bytes(set.get()) == sizeof number) std::memcpy(&number, tf().tensor_data(set.get()), sizeof number);
    const int32_t count = srt_process_set(context, number, nullptr, 0);
    if (count < 0) outcome.fail({SRT_INVALID_ARGUMENT, "there is no process set " + std::to_string(number)});
    Numbers ranks(static_cast<size_t>(count < 0 ? 0 : count));
    srt_process_set(context, number, ranks.data(), static_cast<int32_t>(ranks.size()));
    return ranks;
  });
}

}  // namespace sirtaki::tensorflow
