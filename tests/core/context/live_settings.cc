// Settings that change while the ranks run: at the same plan on all ranks, and without an effect on any sum.
#include "base/settings/live_settings.h"

#include "world.h"

using namespace world;

namespace {

constexpr int64_t count = 300'001;
constexpr int in_flight = 3;

Options tuned(Over over = Over::memory) { return {.over = over, .knobs = {{"autotune", "1"}, {"chunk_bytes", "8K"}}}; }

// Queues a few sums, whose plans may belong to several Decisions, and waits for them only then.
void sum(Context& context, int rank, int size) {
  std::vector<std::vector<float>> data(in_flight, std::vector<float>(count));
  std::vector<Ticket> handles(in_flight);
  for (int i = 0; i < in_flight; ++i) {
    auto& values = data[static_cast<size_t>(i)];
    for (int64_t at = 0; at < count; ++at) values[static_cast<size_t>(at)] = static_cast<float>(at % 997 + rank + i);
    const std::string name = "x" + std::to_string(i);
    const srt_request request = in_place(SRT_ALLREDUCE, name.c_str(), values, count, DType::float32);
    CHECK_EQUAL(context.enqueue(&request, 1, &handles[static_cast<size_t>(i)]).code(), SRT_OK);
    context.flush();
  }
  expect_ok(context.wait(handles.data(), in_flight, seconds(30)));
  int64_t wrong = 0;
  for (int i = 0; i < in_flight; ++i)
    for (int64_t at = 0; at < count; ++at)
      wrong += data[static_cast<size_t>(i)][static_cast<size_t>(at)] !=
               static_cast<float>((at % 997 + i) * size + size * (size - 1) / 2);
  CHECK_EQUAL(wrong, 0);
  context.release(handles.data(), in_flight);
}

}  // namespace

TEST(sums_stay_exact_while_rank_0_changes_settings) {
  const std::vector<std::pair<const char*, const char*>> changes = {
      {"chunk_bytes", "1M"}, {"chunk_bytes", "4K"},  {"fusion_threshold", "0"}, {"chunk_bytes", "100K"},
      {"spin", "0"},         {"report_bytes", "1"},  {"chunk_bytes", "0"},      {"report_window", "0.001"},
      {"spin", "0.001"},     {"chunk_bytes", "64M"}, {"hand_over", "late"},     {"fusion_threshold", "1M"},
      {"chunk_bytes", "60K"}};
  for (const Over over : {Over::memory, Over::sockets})
    for (int size : check::of<int>({2, 3})) {
      World ranks(size, tuned(over));
      ranks.run([&](int rank, Context& context) {
        for (const auto& [name, value] : changes) {
          if (rank == 0) expect_ok(context.change_setting(name, value));
          sum(context, rank, size);
        }
        CHECK_EQUAL(context.live_setting("chunk_bytes"), 60 << 10);
        CHECK_EQUAL(context.live_setting("fusion_threshold"), 1 << 20);
        CHECK_EQUAL(context.live_setting("spin"), milliseconds(1));
        CHECK_EQUAL(context.live_setting("hand_over"), 2);
      });
    }
}

TEST(settings_stay_as_they_are_without_a_wish) {
  World ranks(2, tuned());
  ranks.run([&](int rank, Context& context) {
    sum(context, rank, 2);
    CHECK_EQUAL(context.live_setting("chunk_bytes"), 8 << 10);
    CHECK_EQUAL(context.live_setting("report_window"), microseconds(300));
    CHECK_EQUAL(context.live_setting("transport"), -1);
  });
}

TEST(ranks_start_with_the_usual_chunks_where_rank_0_has_no_neighbour) {
  World ranks(3, on_hosts({0, 1, 1}, {{"autotune", "1"}}));
  const int64_t usual = SharedRegion::initial_chunk_bytes(Config(), 2);
  ranks.run([&](int rank, Context& context) {
    sum(context, rank, 3);
    CHECK_EQUAL(context.live_setting("chunk_bytes"), usual);
  });
}

TEST(a_change_is_refused_where_it_cannot_be_right) {
  World ranks(2, tuned());
  CHECK_EQUAL(ranks[1].change_setting("spin", "0").code(), SRT_INVALID_ARGUMENT);
  CHECK_EQUAL(ranks[0].change_setting("transport", "socket").code(), SRT_INVALID_ARGUMENT);
  CHECK_EQUAL(ranks[0].change_setting("spin", "-1").code(), SRT_INVALID_ARGUMENT);
  CHECK_EQUAL(ranks[0].change_setting("hand_over", "never").code(), SRT_INVALID_ARGUMENT);
  World untuned(2, {});
  CHECK_EQUAL(untuned[0].change_setting("spin", "0").code(), SRT_INVALID_ARGUMENT);
}

TEST(values_have_the_bounds_of_their_setting) {
  CHECK(may_have(Knob::hand_over, 0) && may_have(Knob::hand_over, 2) && !may_have(Knob::hand_over, 3));
  CHECK(may_have(Knob::spin, seconds(1)) && !may_have(Knob::spin, seconds(1) + 1) && !may_have(Knob::spin, -1));
  CHECK(may_have(Knob::chunk_bytes, 64 << 20) && !may_have(Knob::chunk_bytes, (64 << 20) + 1));
}

TEST(wishes_are_taken_once) {
  LiveSettings settings{Config()};
  CHECK(!settings.take_wishes());
  settings.wish(Knob::spin, 7);
  settings.wish(Knob::hand_over, 1);
  const auto wishes = settings.take_wishes();
  CHECK(wishes && value_in(*wishes, Knob::spin) == 7 && value_in(*wishes, Knob::hand_over) == 1);
  CHECK(!settings.take_wishes());
  CHECK_EQUAL(settings.in_use(Knob::hand_over), 0);
  settings.use(*wishes);
  CHECK_EQUAL(settings.in_use(Knob::hand_over), 1);
}
