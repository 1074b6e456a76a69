// The handler that compiled programs call, with hand-made frames: two ranks of one process, which take turns at being
// the process's context.
#include <memory>
#include <thread>

#include "xla_program.h"

using namespace program;

namespace {

std::string text_of(XlaError* error) {
  const std::unique_ptr<XlaError> owned(error);
  return error ? std::to_string(static_cast<int>(error->code)) + " " + error->message : "";
}

}  // namespace

TEST(it_says_the_version_it_was_asked_for) {
  for (const auto [asked, told] : {std::pair{1, 1}, {2, 2}, {3, 3}, {7, 3}}) {
    auto* handler = reinterpret_cast<XlaHandler*>(sirtaki_xla_handler(0, asked, 0));
    REQUIRE(handler != nullptr);
    XlaMetadata metadata{};
    XlaMetadataExtension extension{{sizeof extension, xla_metadata_extension, nullptr}, &metadata};
    XlaCallFrame frame{};
    frame.extensions = &extension.base;
    CHECK(handler(&frame) == nullptr);
    CHECK_EQUAL(metadata.api_version.minor_version, told);
  }
  CHECK(sirtaki_xla_handler(0, 0, 0) == nullptr);
  CHECK(sirtaki_xla_handler(1, 0, 0) == nullptr);
}

TEST(operands_become_sums_where_they_are) {
  Ranks ranks(2);
  std::vector<Array> first{Array({1, 2}), Array({10, 20})}, second{Array({5}), Array({7})};
  std::vector<Step> steps(2, Step(SRT_ALLREDUCE, "weights\nbias"));
  for (size_t rank = 0; rank < 2; ++rank) {
    steps[rank].add(first[rank], first[rank]);
    steps[rank].add(second[rank], second[rank]);
    ranks.call(static_cast<int>(rank), steps[rank]);
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK_EQUAL(steps[rank].outcome(), "");
    CHECK_EQUAL(first[rank].values, (std::vector<float>{11, 22}));
    CHECK_EQUAL(second[rank].values, (std::vector<float>{12}));
  }
}

TEST(a_step_is_counted_when_its_exchange_has_ended_well) {
  Ranks ranks(2);
  const auto exchange = [&](int64_t ends_step, std::vector<Array> arrays) {
    std::vector<Step> steps(2, Step(SRT_ALLREDUCE, "gradients.a\ngradients.b"));
    for (size_t rank = 0; rank < 2; ++rank) {
      steps[rank].integers["ends_step"] = ends_step;
      for (int i = 0; i < 2; ++i) steps[rank].add(arrays[2 * rank + i], arrays[2 * rank + i]);
      ranks.call(static_cast<int>(rank), steps[rank]);
    }
    for (Step& step : steps) step.outcome();
  };
  exchange(1, std::vector<Array>(4, Array({1, 2})));
  for (int rank = 0; rank < 2; ++rank) CHECK_EQUAL(steps_of(ranks[rank]), 1);  // however many tensors it has
  exchange(0, std::vector<Array>(4, Array({1, 2})));
  exchange(1, {Array({1}), Array({1}), Array({1}), Array({1, 2})});  // fails: the shapes differ
  for (int rank = 0; rank < 2; ++rank) CHECK_EQUAL(steps_of(ranks[rank]), 1);
  exchange(1, std::vector<Array>(4, Array({1, 2})));
  for (int rank = 0; rank < 2; ++rank) CHECK_EQUAL(steps_of(ranks[rank]), 2);
}

TEST(a_step_is_that_of_the_optimizer_whose_number_the_program_has) {
  Ranks ranks(1);
  const int64_t large = (int64_t{1} << 32) + 1;
  const auto step = [&](int64_t ends_step) {
    Array array({1, 2});
    Step sum(SRT_ALLREDUCE, "gradients");
    sum.integers["ends_step"] = ends_step;
    sum.add(array, array);
    ranks.call(0, sum);
    CHECK_EQUAL(sum.outcome(), "");
  };
  step(1);  // that of an optimizer without a number
  CHECK_EQUAL(step_counts_of(ranks[0]).optimizer, 0);
  CHECK_EQUAL(step_counts_of(ranks[0]).latest[14], 0.0);
  for (const int64_t ends_step : {large, int64_t{7}, int64_t{0}, large}) step(ends_step);
  const srt_step_counts counts = step_counts_of(ranks[0]);
  CHECK_EQUAL(counts.number, 4);
  CHECK_EQUAL(counts.optimizer, large);
  CHECK_EQUAL(counts.optimizer_steps, 2);
  CHECK(counts.latest[14] > counts.last && counts.latest[13] == 0);  // a step of another one is between them
}

TEST(steps_that_end_on_several_threads_are_all_counted) {
  Ranks ranks(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int step = 0; step < 5'000; ++step) srt_end_steps(ranks[0], 1, 0);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(steps_of(ranks[0]), 20'000);
  srt_step_counts too_small{};
  CHECK_EQUAL(srt_get_steps(ranks[0], &too_small), SRT_INVALID_ARGUMENT);
}

TEST(calls_may_start_in_any_order) {
  Ranks ranks(2);
  std::vector<Array> arrays(4, Array({1, 2, 3}));
  std::vector<Step> steps;
  for (const char* name : {"a", "b", "a", "b"}) {
    steps.emplace_back(SRT_ALLREDUCE, name);
    Array& array = arrays[steps.size() - 1];
    steps.back().add(array, array);
  }
  for (const int step : {0, 1}) ranks.call(0, steps[static_cast<size_t>(step)]);
  for (const int step : {3, 2}) ranks.call(1, steps[static_cast<size_t>(step)]);
  for (Step& step : steps) CHECK_EQUAL(step.outcome(), "");
  for (const Array& array : arrays) CHECK_EQUAL(array.values, (std::vector<float>{2, 4, 6}));
}

TEST(rows_are_gathered_and_exchanged_where_the_program_wants_them) {
  Ranks ranks(2);
  std::vector<Array> rows{Array({1, 2}), Array({3, 4})}, gathered(2, Array({0, 0, 0, 0})), exchanged(2, Array({0, 0}));
  std::vector<Step> steps;
  for (size_t rank = 0; rank < 2; ++rank) {
    steps.emplace_back(SRT_ALLGATHER, "rows", 2).add(rows[rank], gathered[rank]);
    steps.emplace_back(SRT_ALLTOALL, "rows", 2).add(rows[rank], exchanged[rank]);
  }
  for (size_t i = 0; i < steps.size(); ++i) ranks.call(static_cast<int>(i / 2), steps[i]);
  for (Step& step : steps) CHECK_EQUAL(step.outcome(), "");
  CHECK_EQUAL(gathered[0].values, (std::vector<float>{1, 2, 3, 4}));
  CHECK_EQUAL(gathered[1].values, gathered[0].values);
  CHECK_EQUAL(exchanged[0].values, (std::vector<float>{1, 3}));
  CHECK_EQUAL(exchanged[1].values, (std::vector<float>{2, 4}));
}

TEST(programs_of_other_shapes_are_told_apart_and_the_next_call_works) {
  Ranks ranks(2);
  for (const int32_t kind : {SRT_ALLREDUCE, SRT_ALLGATHER}) {
    std::vector<Array> rows{Array({1, 2}), Array({3})}, results{Array({0, 0, 0, 0}), Array({0, 0})};
    std::vector<Step> steps(2, Step(kind, "rows", kind == SRT_ALLGATHER ? 2 : 0));
    for (size_t rank = 0; rank < 2; ++rank) {
      steps[rank].add(rows[rank], results[rank]);
      ranks.call(static_cast<int>(rank), steps[rank]);
    }
    for (Step& step : steps) {
      const std::string outcome = step.outcome();
      CHECK(contains(outcome, "3 "));
      CHECK(contains(outcome, "ranks disagree about 'rows'"));
    }
  }
  std::vector<Array> arrays(2, Array({1}));
  std::vector<Step> steps(2, Step(SRT_ALLREDUCE, "rows"));
  for (size_t rank = 0; rank < 2; ++rank) {
    steps[rank].add(arrays[rank], arrays[rank]);
    ranks.call(static_cast<int>(rank), steps[rank]);
  }
  for (Step& step : steps) CHECK_EQUAL(step.outcome(), "");
}

TEST(what_one_rank_can_see_alone_fails_at_once) {
  Array array({1});
  const auto outcome = [&](Step step, int64_t members = 0) {
    step.integers["members"] = members;
    step.add(array, array);
    const std::string refused = text_of(step.call());
    return refused.empty() ? step.outcome() : refused;
  };
  CHECK(contains(outcome(Step(SRT_ALLREDUCE, "x")), "9 sirtaki is not initialised in this process: call init()"));
  Ranks ranks(1);
  srt_set_process_context(ranks[0]);
  CHECK_EQUAL(outcome(Step(SRT_ALLREDUCE, "x")), "");
  CHECK(contains(outcome(Step(SRT_ALLGATHER, "x"), 3), "3 the program was compiled for 3 ranks, but now there are 1"));
  Step odd(SRT_ALLREDUCE, "x");
  odd.dtype = static_cast<XlaDataType>(21);
  CHECK(contains(outcome(odd), "12 'x': sirtaki cannot exchange elements of XLA's type 21"));
  Step root(SRT_BROADCAST, "x");
  root.integers["root"] = 5;
  CHECK(contains(outcome(root), "3 'x': the root rank 5 is not in this job (ranks 0"));
  Step unnumbered(SRT_ALLREDUCE, "x");
  unnumbered.integers["number"] = -1;
  CHECK(contains(outcome(unnumbered), "12 'x': this version of JAX does not tell when it has lowered a program"));
  Step nonsense(SRT_ALLREDUCE, "x");
  XlaBuffer buffer = array.buffer();
  buffer.dimensions = -1;  // no vector has so few dimensions
  nonsense.add(buffer, buffer);
  CHECK(contains(text_of(nonsense.call()), "13 unexpected in a compiled program's call: "));
  Step nothing(SRT_ALLREDUCE, "");
  CHECK_EQUAL(text_of(nothing.call()), "");
  CHECK(nothing.future == nullptr);
}

TEST(calls_in_flight_end_with_the_context) {
  Array array({1});
  Step step(SRT_ALLREDUCE, "alone");
  step.add(array, array);
  {
    Ranks ranks(2);
    ranks.call(0, step);
    srt_abort(ranks[1], "no batch is left");
    CHECK(contains(step.outcome(), "no batch is left"));
  }
}
