// Reports and Decisions as bytes: decoding restores every field, and malformed bytes are rejected without harm.
#include <random>

#include "control_messages.h"

using namespace sirtaki;

namespace {

// Checks that bytes which decode also encode to bytes that decode to the same message; all others are rejected.
template <typename Message>
void mutate(const Bytes& valid, uint32_t seed) {
  std::mt19937 random(seed);
  Message message;
  for (size_t length = 0; length < valid.size(); ++length) CHECK(!decode(std::span(valid).first(length), message));
  for (int i = 0; i < 40'000; ++i) {
    Bytes bytes = valid;
    for (uint32_t changes = random() % 4 + 1; changes > 0; --changes) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0: bytes[at] = static_cast<uint8_t>(random()); break;
        case 1: bytes[at] ^= static_cast<uint8_t>(1u << random() % 8); break;
        case 2: bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at)); break;
        default: bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), 0xff); break;
      }
    }
    if (!decode(bytes, message)) continue;
    const Bytes again = bytes_of(message);
    Message copy;
    CHECK(decode(again, copy) && bytes_of(copy) == again);
  }
}

// Returns the message as decoded from its bytes, and checks that it has the same bytes again.
template <typename Message>
Message decoded(const Message& sent) {
  const Bytes bytes = bytes_of(sent);
  Message received;
  CHECK(decode(bytes, received));
  CHECK(bytes == bytes_of(received));
  return received;
}

}  // namespace

TEST(report_survives_the_wire) {
  const Report report = decoded(rich_report());
  CHECK_EQUAL(report.last_decision, 12u);
  CHECK(report.goodbye);
  CHECK_EQUAL(report.lapsed, 3u);
  CHECK_EQUAL(report.present, rich_report().present);
  CHECK_EQUAL(report.absent, rich_report().absent);
  CHECK_EQUAL(report.joined, rich_report().joined);
  REQUIRE(report.wait_report.has_value());
  CHECK_EQUAL(report.wait_report->waits_for, "other");
  CHECK(report.wait_report->frames == rich_rank_report().frames);
  REQUIRE(report.full_requests.size() == 3);
  CHECK(*report.full_requests[0].signature == rich_signature());
  CHECK(report.full_requests[0].absent);
  CHECK(*report.full_requests[1].signature == add_set({0, 1, 2}));
  CHECK(*report.full_requests[2].signature == signature_with_deadline());
}

TEST(nothing_may_follow_a_message) {
  Bytes report_and_more = bytes_of(rich_report()), decision_and_more = bytes_of(rich_decision());
  report_and_more.push_back(0);
  decision_and_more.push_back(0);
  Report report;
  Decision decision;
  CHECK(!decode(report_and_more, report));
  CHECK(!decode(decision_and_more, decision));
}

TEST(decision_survives_the_wire) {
  const Decision decision = decoded(rich_decision());
  REQUIRE(decision.plans.size() == rich_decision().plans.size());
  CHECK_EQUAL(decision.number, 13u);
  CHECK_EQUAL(decision.plans[0].items, rich_decision().plans[0].items);
  CHECK(decision.plans[0].untouched && decision.plans[0].absentees.empty());
  CHECK(!decision.plans[1].untouched);
  CHECK_EQUAL(decision.plans[1].absentees, (std::vector<int32_t>{0, 3}));
  CHECK(*decision.responses[0].signature == rich_signature());
  CHECK_EQUAL(decision.responses[0].rows, rich_decision().responses[0].rows);
  CHECK_EQUAL(decision.refusals[0].text, "ranks disagree");
  CHECK_EQUAL(decision.set_changes[0].members, rich_decision().set_changes[0].members);
  CHECK_EQUAL(decision.asked, rich_decision().asked);
  CHECK_EQUAL(decision.stalls[0].names, rich_decision().stalls[0].names);
  REQUIRE(decision.stalls[0].rank_reports.size() == 1);
  CHECK(decision.stalls[0].rank_reports[0].frames == rich_rank_report().frames);
  REQUIRE(decision.lateness.size() == 2);
  CHECK_EQUAL(decision.lateness[0].rank, 1);
  CHECK(decision.lateness[0].lateness == (Lateness{4, 5'000, 3'000}));
  CHECK_EQUAL(decision.fatal_text, "too late");
  CHECK_EQUAL(decision.culprit, 2);
  CHECK(decision.stalls[0].is_over);
}

TEST(decoding_reuses_a_message_without_a_trace) {
  Report report;
  REQUIRE(decode(bytes_of(rich_report()), report));
  REQUIRE(decode(bytes_of(Report()), report));
  CHECK(bytes_of(report) == bytes_of(Report()));
  Decision decision;
  REQUIRE(decode(bytes_of(rich_decision()), decision));
  REQUIRE(decode(bytes_of(Decision()), decision));
  CHECK(bytes_of(decision) == bytes_of(Decision()));
}

TEST(unreasonable_signatures_are_refused) {
  const auto decodes = [](const Signature& signature) {
    Report report;
    report.full_requests = {{std::make_shared<Signature>(signature), false}};
    return decode(bytes_of(report), report);
  };
  CHECK(decodes(allreduce("x", {1 << 20, 0, 7})));
  CHECK(decodes(allreduce(std::string(longest_name, 'x'))));
  CHECK(!decodes(allreduce(std::string(longest_name + 1, 'x'))));
  CHECK(!decodes(allreduce("")));
  CHECK(!decodes(allreduce("a\nb")));
  CHECK(!decodes(allreduce("x", {-1})));
  CHECK(!decodes(allreduce("x", {int64_t{1} << 40, int64_t{1} << 40})));
  CHECK(!decodes(allreduce("x", {int64_t{1} << 40, int64_t{1} << 40, 0})));
  CHECK(!decodes(allreduce("x", std::vector<int64_t>(most_dimensions + 1, 1))));
  CHECK(!decodes(in_group(allreduce("x"), 1, 0)));
  CHECK(!decodes(in_group(allreduce("x"), 0, 2)));
  CHECK(!decodes(in_group(allreduce("x"), 1, -2)));
  Signature scaled = allreduce("x");
  scaled.prescale = __builtin_nan("");
  CHECK(!decodes(scaled));
  Signature encoded = allreduce("x");
  encoded.wire_format = WireFormat::int8;
  CHECK(decodes(encoded));
  for (void (*change)(Signature&) : {+[](Signature& s) { s.dtype = DType::bfloat16; },
                                     +[](Signature& s) { s.reduce_op = ReduceOp::max; }, +[](Signature& s) {
    s.device = 0;
  }, +[](Signature& s) { s.wire_format = static_cast<WireFormat>(wire_format_count); }}) {
    Signature unreasonable = encoded;
    change(unreasonable);
    CHECK(!decodes(unreasonable));
  }
  CHECK(decodes(add_set(std::vector<int64_t>(1'000, 1'000'000))));
}

TEST(a_deadline_adds_bytes_only_where_there_is_one) {
  const auto size_of = [](const Signature& signature) {
    Report report;
    report.full_requests = {{std::make_shared<Signature>(signature), false}};
    return bytes_of(report).size();
  };
  Signature plain = signature_with_deadline();
  plain.deadline.reset();
  CHECK_EQUAL(size_of(signature_with_deadline()) - size_of(plain),
              sizeof(int64_t) + sizeof(int32_t) + sizeof(uint64_t));
}

TEST(unreasonable_deadlines_are_refused) {
  const auto decodes = [](void (*change)(Signature&)) {
    Signature signature = signature_with_deadline();
    change(signature);
    Report report;
    report.full_requests = {{std::make_shared<Signature>(signature), false}};
    return decode(bytes_of(report), report);
  };
  CHECK(decodes(+[](Signature&) {}));
  for (void (*change)(Signature&) : {
           +[](Signature& s) { s.deadline->after = -1; },
           +[](Signature& s) { s.deadline->quorum = 0; },
           +[](Signature& s) { s.deadline->round = 0; },
           +[](Signature& s) { s.deadline->round = 4; },
           +[](Signature& s) { s.name = " (round 3)"; },
           +[](Signature& s) { s.kind = Kind::broadcast; },
           +[](Signature& s) { s.reduce_op = ReduceOp::max; },
           +[](Signature& s) { s.device = 0; },
           +[](Signature& s) { s.process_set = 1; },
           +[](Signature& s) { s.wire_format = WireFormat::int8; },
           +[](Signature& s) { s = in_group(s, 1, 2); },
       })
    CHECK(!decodes(change));
}

TEST(unreasonable_whereabouts_are_refused) {
  const auto decodes = [](const StalledRankReport& wait_report) {
    Report report;
    report.wait_report = wait_report;
    return decode(bytes_of(report), report);
  };
  const StackFrame frame{"f", "train.py", 1};
  CHECK(decodes({0, true, {}, std::vector<StackFrame>(most_frames, frame)}));
  CHECK(!decodes({0, true, {}, std::vector<StackFrame>(most_frames + 1, frame)}));
  CHECK(!decodes({0, true, {}, {{std::string(longest_frame_text + 1, 'x'), "train.py", 1}}}));
  CHECK(!decodes({0, true, std::string(longest_name + 1, 'x'), {}}));
  CHECK(!decodes({0, true, "a\nb", {}}));
  Report report;
  report.wait_report = StalledRankReport{0, true, {}, {{"f\x1b[2J", "train.py", 1}}};
  REQUIRE(decode(bytes_of(report), report));
  CHECK_EQUAL(report.wait_report->frames[0].function, "f?[2J");
}

TEST(texts_that_a_terminal_would_obey_are_not_shown) {
  Decision decision;
  decision.refusals = {{0, Kind::broadcast, "x", {0}, SRT_MISMATCH, "ranks\x1b[2J disagree\xc2\x9b"}};
  decision.fatal = SRT_TIMEOUT;
  decision.fatal_text = "too late\x07\xff";
  REQUIRE(decode(bytes_of(decision), decision));
  CHECK_EQUAL(decision.refusals[0].text, "ranks?[2J disagree?");
  CHECK_EQUAL(decision.fatal_text, "too late??");
  decision.refusals[0].name = "a\xc2\x9b";
  CHECK(!decode(bytes_of(decision), decision));
}

TEST(long_lists_cost_nothing_before_they_are_there) {
  Bytes bytes = bytes_of(Report());
  bytes[8] = bytes[9] = bytes[10] = bytes[11] = 0xff;  // 4 billion cache ids
  Report report;
  CHECK(!decode(bytes, report));
  CHECK(report.present.capacity() < 1'000);
}

TEST(mutated_reports_do_no_harm) { mutate<Report>(bytes_of(rich_report()), 1); }

TEST(mutated_decisions_do_no_harm) { mutate<Decision>(bytes_of(rich_decision()), 2); }

// Feeds the state machines themselves with valid bytes of which some were changed.
TEST(mutated_messages_leave_the_state_machines_whole) {
  for (uint32_t seed = 0; seed < 3'000; ++seed) {
    std::mt19937 random(seed);
    World world(2);
    world.submit_all(allreduce("a"));
    world.submit_all(allgather("g", {2, 3}));
    world.round();
    world.submit_all(allreduce("a"));
    world.submit_all(add_set({0}));
    Bytes report = world.take_report(0);
    report[random() % report.size()] ^= static_cast<uint8_t>(1u << random() % 8);
    const Bytes other = world.take_report(1);
    if (!world.coordinator.merge(0, report, world.now).is_ok()) continue;
    world.deliver(1, other);
    Bytes decision;
    if (!world.coordinator.decide(world.now, decision)) continue;
    Outcome outcome;
    decision[random() % decision.size()] ^= static_cast<uint8_t>(1u << random() % 8);
    (void)world.negotiators[0]->apply(decision, outcome).is_ok();
    (void)world.negotiators[1]->apply(decision, outcome).is_ok();
  }
}
