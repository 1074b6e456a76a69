// Tests of the handle table alone.
#include "context/state/handle_table.h"

#include "check.h"

using namespace sirtaki;

// Threads that fail, wait and shut down may all end the same handle.
TEST(a_handle_keeps_its_first_ending) {
  const Log log(-1);
  Timeline timeline(0, 1, "rank 0", log);
  Observer observer(1, 8, timeline);
  HandleSignals signals;
  HandleTable table(observer, signals);
  HandleEntry entry;
  entry.signature = std::make_shared<Signature>();
  const Ticket first = table.open(std::move(entry));
  HandleEntry other;
  other.signature = std::make_shared<Signature>();
  table.open(std::move(other));
  table.end(first, {SRT_PEER_LOST, "it was lost"});
  table.end(first, Status::ok());
  CHECK_EQUAL(table.find(first)->status.code(), SRT_PEER_LOST);
  CHECK_EQUAL(table.find(first)->error.substr(table.find(first)->error.size() - 11), "it was lost");
  CHECK(table.any_unfinished());
}

TEST(watched_operations_are_reported_once) {
  const Log log(-1);
  Timeline timeline(0, 1, "rank 0", log);
  Observer observer(1, 8, timeline);
  HandleSignals signals;
  HandleTable table(observer, signals);
  const auto open = [&table] {
    HandleEntry entry;
    entry.signature = std::make_shared<Signature>();
    return table.open(std::move(entry));
  };
  const Ticket dropped = open(), unwatched = open(), watched = open();
  table.watch(dropped, Watch::until_finished);
  table.watch(watched, Watch::until_launched);
  table.watch(watched, Watch::until_finished);
  table.release(dropped);
  for (Ticket handle : {unwatched, watched, dropped}) table.end(handle, Status::ok());
  Ticket reported[3]{};
  CHECK_EQUAL(table.take_reports(reported, 1), 1);
  CHECK_EQUAL(table.take_reports(reported + 1, 2), 1);
  CHECK_EQUAL(reported[0], watched);
  CHECK_EQUAL(reported[1], dropped);
  CHECK_EQUAL(table.take_reports(reported, 3), 0);
  CHECK(!table.any_watched());
}

TEST(memory_in_use_may_be_read_by_others_but_not_written) {
  const auto reads = [](uintptr_t at, int64_t bytes) { return MemoryRanges::Use{at, 0, bytes, 0}; };
  const auto writes = [](uintptr_t at, int64_t bytes) { return MemoryRanges::Use{0, at, 0, bytes}; };
  MemoryRanges ranges;
  ranges.add(1, reads(1'000, 100));
  ranges.add(2, writes(2'000, 100));
  CHECK_EQUAL(ranges.collision(reads(1'050, 10)), 0u);
  CHECK_EQUAL(ranges.collision(writes(1'050, 10)), 1u);
  CHECK_EQUAL(ranges.collision(writes(990, 11)), 1u);
  CHECK_EQUAL(ranges.collision(reads(2'099, 1)), 2u);
  CHECK_EQUAL(ranges.collision(writes(1'900, 500)), 2u);
  for (const auto& beside : {reads(1'900, 100), writes(1'900, 100), writes(1'100, 100), writes(990, 10)})
    CHECK_EQUAL(ranges.collision(beside), 0u);
  ranges.remove(1, reads(1'000, 100));
  CHECK_EQUAL(ranges.collision(writes(1'050, 10)), 0u);
}

TEST(an_input_that_begins_where_the_output_does_is_in_use_as_a_whole) {
  const MemoryRanges::Use in_place{1'000, 1'000, 100, 100}, longer_input{1'000, 1'000, 100, 20};
  const MemoryRanges::Use writes_tail{0, 1'050, 0, 10};
  for (const auto& use : {in_place, longer_input}) {
    MemoryRanges ranges;
    ranges.add(1, use);
    CHECK_EQUAL(ranges.collision(writes_tail), 1u);
    ranges.remove(1, use);
    CHECK_EQUAL(ranges.collision(writes_tail), 0u);
  }
}
