// What the flight recorder keeps, and what becomes of old records and long names.
#include "check.h"
#include "observe/observer.h"

using namespace sirtaki;

namespace {

Submitted named(const std::string& name) { return {name, "all-reduce", 0, 40}; }

}  // namespace

TEST(a_record_follows_its_operation) {
  Observer observer(2, 8);
  observer.set_moment(100);
  const uint64_t number = observer.submitted(named("loss"));
  observer.set_moment(110);
  observer.reported(number, true);
  observer.set_moment(130);
  observer.decided(number, 7, 3);
  observer.transferred(number, {.started = 140});
  observer.set_moment(160);
  observer.ended(number, true, SRT_OK);
  int seen = 0;
  observer.recorder().visit([&](const OperationRecord& record) {
    ++seen;
    CHECK_EQUAL(record.name.view(), "loss");
    CHECK_EQUAL(record.submitted, 100);
    CHECK_EQUAL(record.reported, 110);
    CHECK_EQUAL(record.decided, 130);
    CHECK_EQUAL(record.transfer.started, 140);
    CHECK_EQUAL(record.finished, 160);
    CHECK_EQUAL(record.plan, 7u);
    CHECK_EQUAL(record.fused, 3);
    CHECK_EQUAL(record.bytes, 40);
    CHECK(record.is_cached && !record.is_open());
  });
  CHECK_EQUAL(seen, 1);
  CHECK_EQUAL(observer.statistics().operations, 1);
  CHECK_EQUAL(observer.statistics().waiting.until(1000), 30);
}

TEST(the_last_operations_are_kept_and_older_ones_harm_nobody) {
  Observer observer(1, 4);
  uint64_t first = 0;
  for (int i = 0; i < 10; ++i) {
    const uint64_t number = observer.submitted(named("t" + std::to_string(i)));
    if (i == 0) first = number;
  }
  observer.decided(first, 1, 1);  // its place has been taken over
  observer.ended(first, true, SRT_OK);
  std::string names;
  observer.recorder().visit([&](const OperationRecord& record) {
    names += std::string(record.name.view()) + " ";
    CHECK(record.is_open());
  });
  CHECK_EQUAL(names, "t6 t7 t8 t9 ");
}

TEST(time_that_overlaps_counts_once) {
  BusyTime busy;
  busy.begin(10);
  busy.begin(20);
  busy.end(30);
  CHECK_EQUAL(busy.until(35), 25);
  busy.end(40);
  CHECK_EQUAL(busy.until(100), 30);
  busy.begin(100);
  busy.end(90);  // a clock that was read a little earlier
  CHECK_EQUAL(busy.until(200), 30);
}

TEST(long_names_keep_their_ends_and_whole_characters) {
  CHECK_EQUAL(ShortName("").view(), "");
  CHECK_EQUAL(ShortName(std::string(79, 'x')).view(), std::string(79, 'x'));
  const std::string cut(ShortName("model.first." + std::string(200, 'x') + ".last.weight").view());
  CHECK_EQUAL(cut.size(), 79u);
  CHECK(cut.starts_with("model.first.x") && cut.ends_with("x.last.weight"));
  for (size_t shift = 0; shift < 4; ++shift) {
    std::string euros(shift, 'x');
    for (int i = 0; i < 60; ++i) euros += "\xe2\x82\xac";
    std::string short_name(ShortName(euros).view());
    short_name.erase(short_name.find("..."), 3);
    CHECK_EQUAL((short_name.size() - shift) % 3, 0u);
  }
}

CHECK_MAIN()
