// Small tensors of a plan on GPUs: copied by few calls of the driver, or not at all where they lie side by side.
#include <numeric>

#include "gpu_world.h"

using namespace world;

namespace {

// Offsets of tensors in a block of memory, in elements.
using Offsets = std::vector<int64_t>;
using Layout = std::function<Offsets(const std::vector<int64_t>& counts)>;

Offsets with_gaps_of(int64_t gap, const std::vector<int64_t>& counts, int64_t begin = 0) {
  Offsets offsets;
  for (const int64_t count : counts) {
    offsets.push_back(begin);
    begin += count + gap;
  }
  return offsets;
}
Offsets side_by_side(const std::vector<int64_t>& counts) { return with_gaps_of(0, counts); }
Offsets apart(const std::vector<int64_t>& counts) { return with_gaps_of(1, counts); }
Offsets backwards(const std::vector<int64_t>& counts) {
  Offsets offsets = with_gaps_of(0, {counts.rbegin(), counts.rend()});
  std::reverse(offsets.begin(), offsets.end());
  return offsets;
}

// A rank's tensors of floats, summed in one plan, in the order of their indices. All are in one block of memory, with
// room for outputs behind the inputs.
class Sums {
 public:
  Sums(FakeGpu& fake, int rank, std::vector<int64_t> counts, Offsets inputs, Offsets outputs)
      : rank_(rank), counts_(std::move(counts)), inputs_(std::move(inputs)), outputs_(std::move(outputs)),
        memory_(fake, rank, bytes_of(values())) {}

  // Sums them, and returns how that ended.
  Status reduce(Context& context) {
    std::vector<srt_request> requests;
    std::vector<std::string> names;
    for (size_t i = 0; i < counts_.size(); ++i) names.push_back(format("tensor %03zu", i));
    for (size_t i = 0; i < counts_.size(); ++i) {
      srt_request& made =
          requests.emplace_back(on_gpu(request(SRT_ALLREDUCE, names[i].c_str(), &counts_[i], 1), rank_));
      made.input = address(inputs_[i]);
      made.output = address(outputs_[i]);
      made.group_id = 1;
      made.group_size = static_cast<int32_t>(counts_.size());
    }
    const auto count = static_cast<int32_t>(requests.size());
    std::vector<Ticket> handles(requests.size());
    SIRTAKI_TRY(context.enqueue(requests.data(), count, handles.data()));
    const Status ended = context.wait(handles.data(), count, patience);
    context.release(handles.data(), count);
    return ended;
  }

  // Returns the number of wrong results of a sum over so many ranks.
  int64_t wrong(int ranks) {
    const std::vector<float> found = values_in<float>(memory_.bytes());
    int64_t wrong = 0;
    for (size_t i = 0; i < counts_.size(); ++i)
      for (int64_t at = 0; at < counts_[i]; ++at) {
        float expected = 0;
        for (int rank = 0; rank < ranks; ++rank) expected += value(i, rank) + static_cast<float>(at);
        wrong += found[static_cast<size_t>(outputs_[i] + at)] != expected;
      }
    return wrong;
  }

 private:
  std::vector<float> values() const {
    std::vector<float> values(static_cast<size_t>(end()), -1);
    for (size_t i = 0; i < counts_.size(); ++i) {
      const auto begin = values.begin() + inputs_[i];
      std::iota(begin, begin + counts_[i], value(i, rank_));
    }
    return values;
  }
  static float value(size_t tensor, int rank) { return static_cast<float>(tensor + 7 * static_cast<size_t>(rank)); }
  uintptr_t address(int64_t offset) const { return memory_.address() + static_cast<uintptr_t>(offset) * sizeof(float); }
  int64_t end() const {
    int64_t end = 0;
    for (size_t i = 0; i < counts_.size(); ++i) end = std::max(end, std::max(inputs_[i], outputs_[i]) + counts_[i]);
    return end;
  }

  const int rank_;
  const std::vector<int64_t> counts_;
  const Offsets inputs_, outputs_;
  OnGpu memory_;
};

// Returns what the fake was asked for since it was reset.
std::string effect(FakeGpu& fake) {
  return format("%d copies, %d batches, %lld bytes, %d sums", fake.calls("cuMemcpyAsync"),
                fake.calls("cuMemcpyBatchAsync"), fake.copied(), fake.calls("ncclAllReduce"));
}

// Sums tensors over two ranks, each with layouts of its own, and returns the effect of both.
std::string sum(FakeGpu& fake, const std::vector<int64_t>& counts,
                const std::vector<std::pair<Layout, Layout>>& layouts) {
  World ranks(2, on_gpus());
  ranks.run([&](int rank, Context& context) {
    const auto& [inputs, outputs] = layouts[static_cast<size_t>(rank) % layouts.size()];
    Sums sums(fake, rank, counts, inputs(counts), outputs(counts));
    expect_ok(sums.reduce(context));
    CHECK_EQUAL(sums.wrong(2), 0);
  });
  return effect(fake);
}

const std::vector<int64_t> forty(40, 100);  // 16,000 bytes of each rank

// A model's gradients, in the order of a backward pass. Gradients of 64 KiB and more, which are not copied, may be
// smaller than the model's, and plans with them: by this divisor.
struct Model {
  std::vector<int64_t> counts;
  int64_t divisor;
};

Model resnet_50() {
  std::vector<int64_t> counts;
  const auto convolution = [&](int64_t from, int64_t to, int64_t width) {
    counts.insert(counts.end(), {from * to * width * width, to, to});  // with its batch normalization
  };
  convolution(3, 64, 7);
  int64_t channels = 64;
  for (const auto& [blocks, width] : {std::pair{3, 64}, {4, 128}, {6, 256}, {3, 512}})
    for (int block = 0; block < blocks; ++block) {
      convolution(channels, width, 1);
      convolution(width, width, 3);
      convolution(width, 4 * width, 1);
      if (block == 0) convolution(channels, 4 * width, 1);
      channels = 4 * width;
    }
  counts.insert(counts.end(), {channels * 1000, 1000});
  std::reverse(counts.begin(), counts.end());
  return {counts, 1};
}

Model bert_large() {
  constexpr int64_t width = 1024, divisor = 16;
  std::vector<int64_t> counts;
  const auto matrix = [&](int64_t rows) { counts.push_back(rows * width / divisor); };
  const auto layer = [&](int64_t outputs, int64_t scale = 1) {
    matrix(outputs * scale);
    counts.push_back(outputs);
  };
  const auto normalization = [&] { counts.insert(counts.end(), {width, width}); };
  matrix(30'522);
  matrix(512);
  counts.push_back(2 * width);
  normalization();
  for (int i = 0; i < 24; ++i) {
    for (int projection = 0; projection < 4; ++projection) layer(width);
    normalization();
    layer(4 * width);
    layer(width, 4);
    normalization();
  }
  layer(width);
  std::reverse(counts.begin(), counts.end());
  return {counts, divisor};
}

// Places the small tensors side by side, and the large tensors behind them.
Offsets small_first(const std::vector<int64_t>& counts) {
  Offsets offsets(counts.size());
  int64_t next = 0;
  for (const bool is_large : {false, true})
    for (size_t i = 0; i < counts.size(); ++i) {
      if ((counts[i] * 4 >= 64 << 10) != is_large) continue;
      offsets[i] = next;
      next += counts[i];
    }
  return offsets;
}

// Returns the effect of a step of one rank with these gradients, all of which are there at once.
std::string step_of(FakeGpu& fake, const Model& model, const Layout& layout) {
  const int copies = fake.calls("cuMemcpyAsync"), batches = fake.calls("cuMemcpyBatchAsync");
  const long long copied = fake.copied();
  World ranks(1, on_gpus({{"gpu_backend", "nccl"}, {"fusion_threshold", std::to_string((64 << 20) / model.divisor)}}));
  ranks.run([&](int rank, Context& context) {
    Sums sums(fake, rank, model.counts, layout(model.counts), layout(model.counts));
    expect_ok(sums.reduce(context));
  });
  return format("%zu gradients: %d copies, %d batches, %lld bytes", model.counts.size(),
                fake.calls("cuMemcpyAsync") - copies, fake.calls("cuMemcpyBatchAsync") - batches,
                fake.copied() - copied);
}

}  // namespace

TEST(small_tensors_are_copied_by_one_call_in_and_one_out) {
  Fake fake;
  CHECK_EQUAL(sum(fake, forty, {{apart, apart}}), "0 copies, 4 batches, 64000 bytes, 2 sums");
}

TEST(a_batch_has_a_bounded_number_of_copies) {
  Fake fake;
  CHECK_EQUAL(sum(fake, std::vector<int64_t>(700, 1), {{apart, apart}}), "0 copies, 8 batches, 11200 bytes, 2 sums");
}

// The process must not have loaded the newer libcuda.
TEST(an_older_driver_copies_small_tensors_by_kernels) {
  Fake fake(4, fake_folder + "/older");
  CHECK_EQUAL(sum(fake, forty, {{apart, apart}}), "0 copies, 0 batches, 0 bytes, 2 sums");
  CHECK_EQUAL(fake.calls("cuLaunchKernel"), 2 * (6 + 2 * 2));  // all once, then a wide and a narrow one in and out
}

TEST(a_driver_without_kernels_copies_each_small_tensor) {
  Fake fake(4, fake_folder + "/bare");
  CHECK_EQUAL(sum(fake, forty, {{apart, apart}}), "160 copies, 0 batches, 64000 bytes, 2 sums");
  CHECK_EQUAL(step_of(fake, resnet_50(), apart), "161 gradients: 218 copies, 0 batches, 540992 bytes");
  CHECK_EQUAL(step_of(fake, bert_large(), apart), "391 gradients: 488 copies, 0 batches, 2596864 bytes");
}

TEST(a_batch_that_fails_ends_all_ranks) {
  for (const int nth : {1, 2, 4}) {
    Fake fake;
    fake.is_to_break();
    fake.fail("cuMemcpyBatchAsync", nth, 999);
    World ranks(2, on_gpus());
    ranks.run([&](int rank, Context& context) {
      Sums sums(fake, rank, forty, apart(forty), apart(forty));
      const Status ended = sums.reduce(context);
      if (nth < 3) CHECK(contains(ended, "cuMemcpyBatchAsync failed; CUDA says: unknown error (error 999)"));
    });
  }
}

TEST(small_tensors_side_by_side_are_summed_where_they_are) {
  Fake fake;
  CHECK_EQUAL(sum(fake, forty, {{side_by_side, side_by_side}}), "0 copies, 0 batches, 0 bytes, 2 sums");
}

TEST(a_rank_copies_its_small_tensors_although_another_does_not) {
  Fake fake;
  CHECK_EQUAL(sum(fake, forty, {{side_by_side, side_by_side}, {apart, apart}}),
              "0 copies, 2 batches, 32000 bytes, 2 sums");
}

TEST(inputs_and_outputs_are_copied_only_where_they_have_to_be) {
  const auto behind = [](const std::vector<int64_t>& counts) { return with_gaps_of(0, counts, 10'000); };
  const auto apart_behind = [](const std::vector<int64_t>& counts) { return with_gaps_of(1, counts, 10'000); };
  const std::pair<std::pair<Layout, Layout>, std::string> cases[] = {
      {{side_by_side, behind}, "0 copies, 0 batches, 0 bytes, 2 sums"},
      {{side_by_side, apart_behind}, "0 copies, 2 batches, 32000 bytes, 2 sums"},
      {{apart, behind}, "0 copies, 2 batches, 32000 bytes, 2 sums"},
      {{backwards, backwards}, "0 copies, 4 batches, 64000 bytes, 2 sums"},
  };
  for (const auto& [layouts, expected] : cases) {
    Fake fake;
    CHECK_EQUAL(sum(fake, forty, {layouts}), expected);
  }
}

TEST(large_tensors_may_lie_beside_small_ones) {
  Fake fake;
  const std::vector<int64_t> counts{100, 20'000, 100, 30'000};
  CHECK_EQUAL(sum(fake, counts, {{small_first, small_first}}), "0 copies, 0 batches, 0 bytes, 6 sums");
}

TEST(gradients_of_models_are_copied_by_few_calls_or_none) {
  Fake fake;
  CHECK_EQUAL(step_of(fake, resnet_50(), apart), "161 gradients: 0 copies, 4 batches, 540992 bytes");
  CHECK_EQUAL(step_of(fake, resnet_50(), small_first), "161 gradients: 0 copies, 0 batches, 0 bytes");
  if (check::is_sanitized) return;
  CHECK_EQUAL(step_of(fake, bert_large(), apart), "391 gradients: 0 copies, 48 batches, 2596864 bytes");
  CHECK_EQUAL(step_of(fake, bert_large(), small_first), "391 gradients: 0 copies, 0 batches, 0 bytes");
}
