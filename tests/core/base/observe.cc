// The contents of the flight recorder, and its handling of old records and long names.
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <thread>

#include "check.h"
#include "observe/observer.h"
#include "observe/records/json.h"
#include "observe/records/program_stack.h"

using namespace sirtaki;

namespace {

// An observer whose log goes nowhere.
struct Quiet {
  explicit Quiet(int32_t size, size_t capacity) : observer(size, capacity, timeline) {}
  Log log{-1};
  Timeline timeline{0, 1, "rank 0", log};
  Observer observer;
};

// The connection between a program stack and its interpreter, whose side the test plays.
struct Channel {
  Channel() { CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0); }
  ~Channel() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  std::string question() const {
    std::string text(4, '\0');
    CHECK_EQUAL(::recv(ends[1], text.data(), 4, 0), 4);
    return text;
  }
  void answer(const std::string& text) const {
    CHECK_EQUAL(::send(ends[1], text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  }

  int ends[2];
};

Submitted named(const std::string& name) { return {name, "all-reduce", 0, 40}; }

}  // namespace

TEST(a_timeline_has_what_the_program_did_on_tracks_that_never_overlap) {
  const Log log{-1};
  Timeline timeline{3, 4, "rank 3", log};
  const std::string path = "/tmp/sirtaki-timeline-" + std::to_string(::getpid());
  timeline.add_program({"lines", "before it starts", 1, 2});
  CHECK(timeline.start(path, false).is_ok());
  timeline.add_program({"lines", "at \"a\".py:1", 1'000, 3'000});
  timeline.add_program({"lines", "at b.py:2", 2'500, 4'000});
  timeline.add_program({"lines", "within what was", 3'500, 3'600});
  timeline.add_program({"collection", "collection", 1'500, 2'000});
  timeline.add_program({"lines", "ends before it begins", 9'000, 8'000});
  timeline.stop();
  std::ifstream file(path);
  std::vector<std::string> found;
  for (std::string line; std::getline(file, line);)
    if (line.find("\"cat\": \"program\"") != line.npos) found.push_back(line.substr(0, line.rfind('}') + 1));
  ::unlink(path.c_str());
  CHECK_EQUAL(found.size(), 3u);
  const char* form = R"({"ph": "X", "name": %s, "cat": "program", "pid": 3, "tid": %d, "ts": %s, "dur": %s})";
  CHECK_EQUAL(found[0], format(form, R"("at \"a\".py:1")", 1'000'000'000, "1.000", "2.000"));
  CHECK_EQUAL(found[1], format(form, R"("at b.py:2")", 1'000'000'000, "3.000", "1.000"));
  CHECK_EQUAL(found[2], format(form, R"("collection")", 1'000'000'001, "1.500", "0.500"));
}

TEST(a_record_follows_its_operation) {
  Quiet quiet(2, 8);
  Observer& observer = quiet.observer;
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

TEST(a_refused_operation_keeps_its_reason_and_the_stack) {
  const Log log{-1};
  Timeline timeline{0, 2, "rank 0", log};
  Observer observer(2, 8, timeline);
  const std::string path = "/tmp/sirtaki-timeline-refused-" + std::to_string(::getpid());
  CHECK(timeline.start(path, false).is_ok());
  observer.set_moment(1'000);
  const uint64_t number = observer.submitted(named("loss"));
  observer.refused(number, {"ranks \"disagree\"", {{"step", "train.py", 7}}});
  observer.ended(number, false, SRT_MISMATCH);
  observer.ended(observer.submitted(named("other")), false, SRT_PEER_LOST);
  timeline.stop();
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  ::unlink(path.c_str());
  const std::string expected = R"("status": "mismatch", "error": "ranks \"disagree\"", "stack": )"
                               R"([{"function": "step", "file": "train.py", "line": 7, "library": false}]})";
  CHECK(text.find(expected) != text.npos);
  CHECK(text.find(R"("status": "peer_lost"})") != text.npos);
  observer.submitted(named("next"));
  for (int i = 0; i < 8; ++i) observer.submitted(named("next"));  // takes the place of the refused one
  observer.recorder().visit([](const OperationRecord& record) { CHECK(!record.refused); });
}

TEST(the_last_operations_are_kept_and_older_ones_harm_nobody) {
  Quiet quiet(1, 4);
  Observer& observer = quiet.observer;
  uint64_t first = 0;
  for (int i = 0; i < 10; ++i) {
    const uint64_t number = observer.submitted(named("t" + std::to_string(i)));
    if (i == 0) first = number;
  }
  observer.decided(first, 1, 1);  // its place has been reused
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
  busy.end(90);  // from a clock that was read a little earlier
  CHECK_EQUAL(busy.until(200), 30);
}

TEST(durations_are_counted_in_the_range_that_holds_them) {
  OperationTimes histogram;
  for (Nanoseconds duration : {Nanoseconds{-5}, microseconds(10), microseconds(10) + 1, seconds(1), seconds(11)})
    histogram.add(duration);
  std::vector<int64_t> expected(OperationTimes::bounds.size() + 1);
  expected[0] = 2;   // none is shorter than 0
  expected[1] = 1;   // above 10 µs
  expected[10] = 1;  // a bound belongs to its range
  expected.back() = 1;
  CHECK(std::ranges::equal(histogram.counts(), expected));
  CHECK_EQUAL(histogram.total(), 2 * microseconds(10) + 1 + seconds(12));
}

TEST(only_operations_that_were_agreed_on_have_durations) {
  Quiet quiet(2, 8);
  Observer& observer = quiet.observer;
  observer.set_moment(0);
  const uint64_t agreed = observer.submitted(named("loss")), refused = observer.submitted(named("uneven"));
  observer.set_moment(microseconds(30));
  observer.decided(agreed, 1, 1);
  observer.ended(refused, false, SRT_MISMATCH);
  observer.set_moment(microseconds(32));
  observer.ended(agreed, true, SRT_OK);
  CHECK_EQUAL(observer.statistics().wait.counts()[1], 1);
  CHECK_EQUAL(observer.statistics().wait.total(), microseconds(30));
  CHECK_EQUAL(observer.statistics().transfer.counts()[0], 1);
  CHECK_EQUAL(observer.statistics().transfer.total(), microseconds(2));
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

TEST(stacks_are_read_from_what_faulthandler_writes) {
  constexpr char dump[] =
      "Thread 0x00007f0000000001 (most recent call first):\n"
      "  File \"/usr/lib/python3.11/threading.py\", line 320 in wait\n"
      "  <no Python frame>\n"
      "\n"
      "Current thread 0x00007f0000000002 (most recent call first):\n"
      "  File \"/home/a \"b\", line 1 in c/train.py\", line 88 in evaluate\n"
      "  File \"train.py\", line ??? in <module>\n"
      "  ...\n";
  const auto frames = parse_stack(dump, 0x7f0000000002);
  REQUIRE(frames.size() == 2);
  CHECK(frames[0] == (StackFrame{"evaluate", "/home/a \"b\", line 1 in c/train.py", 88}));
  CHECK(frames[1] == (StackFrame{"<module>", "train.py", 0}));
  CHECK_EQUAL(parse_stack(dump, 0x7f0000000001).size(), 1u);
  CHECK(parse_stack(dump, 3).empty() && parse_stack("", 1).empty());
  std::string deep = "Thread 0x1 (most recent call first):\n";
  for (int i = 0; i < 200; ++i) deep += "  File \"" + std::string(1000, 'x') + "\", line 1 in f\n";
  CHECK_EQUAL(parse_stack(deep, 1).size(), most_parsed_frames);
  CHECK_EQUAL(parse_stack(deep, 1)[0].file.size(), longest_frame_text);
}

TEST(libraries_are_told_from_the_users_program) {
  for (const char* file : {"/usr/lib/python3.11/threading.py", "/opt/venv/lib64/python3.12/site-packages/keras/a.py",
                           "/usr/lib/python3/dist-packages/six.py", "<frozen importlib._bootstrap>", "<string>"})
    CHECK(is_library(file));
  for (const char* file : {"train.py", "/home/user/train.py", "<stdin>", "<ipython-input-3-ab>"})
    CHECK(!is_library(file));
}

TEST(damaged_stacks_do_no_harm) {
  const std::string dump =
      "Thread 0x00007f0000000001 (most recent call first):\n  File \"train.py\", line 88 in evaluate\n";
  std::mt19937 random(5);
  for (int i = 0; i < 20'000; ++i) {
    std::string damaged = dump;
    for (uint32_t changes = random() % 4 + 1; changes > 0; --changes)
      damaged[random() % damaged.size()] = static_cast<char>(random());
    if (random() % 2) damaged.resize(random() % damaged.size());
    for (const StackFrame& frame : parse_stack(damaged, 0x7f0000000001))
      CHECK(frame.function.find('\n') == std::string::npos && frame.file.size() <= longest_frame_text);
  }
}

TEST(a_program_without_a_handler_is_not_sampled) {
  Channel channel;
  const int end = channel.ends[0];
  ProgramStack stack;
  CHECK(!stack.sample().is_known);
  CHECK(!stack.open({end, 0, 0, 1, ""}).is_ok());
  CHECK(!stack.open({end, -1, SIGRTMAX, 1, ""}).is_ok());
  CHECK(!stack.open({-1, 0, SIGRTMAX, 1, ""}).is_ok());
  CHECK(stack.open({end, 0, SIGRTMAX, 1, nullptr}).is_ok());
  CHECK(!stack.sample().is_known);  // raising the signal would end the process
}

// A framework calls the program through more functions than a sample has room for.
TEST(a_library_does_not_displace_the_users_functions) {
  Channel channel;
  ProgramStack stack;
  REQUIRE(stack.open({channel.ends[0], 0, SIGRTMAX, 1, "/own"}).is_ok());
  std::thread interpreter([&] {
    std::string answer = channel.question();
    answer += "Thread 0x1 (most recent call first):\n  File \"/own/a.py\", line 1 in wait\n";
    for (int i = 1; i <= 30; ++i) answer += format("  File \"/a/site-packages/k.py\", line %d in call\n", i);
    answer += "  File \"train.py\", line 4 in fit\n  File \"train.py\", line 9 in <module>\n";
    channel.answer(answer);
  });
  const StackSample sample = stack.sample();
  interpreter.join();
  CHECK(sample.is_in_sirtaki);
  REQUIRE(sample.frames.size() == most_frames);
  CHECK_EQUAL(sample.frames[0].line, 1);
  CHECK_EQUAL(sample.frames[most_frames - 2].function, "fit");
  CHECK_EQUAL(sample.frames[most_frames - 1].function, "<module>");
}

// The interpreter's side answers the first question only when the second one has arrived.
TEST(an_answer_that_comes_too_late_is_not_taken_for_another) {
  Channel channel;
  ProgramStack stack;
  REQUIRE(stack.open({channel.ends[0], 0, SIGRTMAX, 1, "/own"}).is_ok());
  std::thread interpreter([&] {
    const std::string first = channel.question(), second = channel.question();
    const std::string header = "Thread 0x1 (most recent call first):\n";
    channel.answer(first + header + "  File \"old.py\", line 1 in f\n");
    channel.answer(second + header + "  File \"/own/a.py\", line 2 in wait\n" + "  File \"new.py\", line 3 in g\n");
  });
  CHECK(!stack.sample().is_known);
  const StackSample second = stack.sample();
  interpreter.join();
  CHECK(second.is_known && second.is_in_sirtaki);
  REQUIRE(second.frames.size() == 1);
  CHECK(second.frames[0] == (StackFrame{"g", "new.py", 3}));
}

TEST(json_is_valid_whatever_the_text) {
  JsonWriter json;
  json.begin_object().member("text", "a\"b\\c\n\x7f\xc3\xa9\xff\xed\xa0\x80").member("number", -3);
  json.key("list").begin_array().value(1.5).value(true).value(__builtin_nan("")).end_array().end_object();
  CHECK_EQUAL(json.text(),
              "{\"text\": \"a\\\"b\\\\c\\u000a\x7f\xc3\xa9????\", \"number\": -3, \"list\": [1.5, true, null]}");
}
