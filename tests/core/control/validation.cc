// The properties on which ranks must agree, and the errors that they receive when they do not.
#include "control_world.h"

using namespace sirtaki;

namespace {

struct Disagreement {
  const char* about;
  Signature first;
  Signature second;
  std::vector<const char*> parts;  // of the text
};

std::vector<Disagreement> disagreements() {
  const Signature x = allreduce("x", {2, 3});
  return {
      {"dtype",
       x,
       changed(x, [](Signature& s) { s.dtype = DType::float64; }),
       {"float32 of shape [2, 3]", "float64 of shape [2, 3]", "must pass the same dtype"}},
      {"shape", x, allreduce("x", {3, 2}), {"shape [2, 3]", "shape [3, 2]", "must pass the same shape"}},
      {"dimensions", x, allreduce("x", {6}), {"shape [2, 3]", "shape [6]"}},
      {"reduce op", x, changed(x, [](Signature& s) { s.reduce_op = ReduceOp::max; }), {"op sum", "op max", "same op"}},
      {"prescale",
       x,
       changed(x, [](Signature& s) { s.prescale = 0.5; }),
       {"prescale factor 1 ", "prescale factor 0.5 ", "must pass the same factors"}},
      {"postscale",
       x,
       changed(x, [](Signature& s) { s.postscale = 2; }),
       {"postscale factor 1,", "postscale factor 2;"}},
      {"wire format",
       x,
       changed(x, [](Signature& s) { s.wire_format = WireFormat::fp8; }),
       {"wire format exact", "wire format fp8", "same wire format"}},
      {"device", x, changed(x, [](Signature& s) { s.device = 0; }), {"on the CPU", "on device 0"}},
      {"layout", x, changed(x, [](Signature& s) { s.layout = 0xab; }), {"row-major", "memory layout ab"}},
      {"group", x, in_group(x, 5, 1), {"no group", "group 5 of 1 tensors"}},
      {"root", broadcast("x", 0), broadcast("x", 1), {"root rank 0", "root rank 1", "same root rank"}},
      {"ragged",
       allgather("x", {7, 3}),
       allgather("x", {7, 4}),
       {"shape [7, 3]", "shape [7, 4]", "except for the first dimension"}},
      {"splits", x, changed(x, [](Signature& s) { s.splits = {1, 2}; }), {"0 splits", "2 splits"}},
      {"set to add", add_set({0, 1}, "x"), add_set({0, 2}, "x"), {"the ranks [0, 1]", "the ranks [0, 2]"}},
      {"set to remove", remove_set(1, "x"), remove_set(2, "x"), {"process set 1", "process set 2"}},
  };
}

// Submits an operation in which two ranks have different values of one field.
void submit_differing(World& world, int32_t Signature::* field, int32_t first, int32_t second) {
  Signature signatures[] = {allreduce("x"), allreduce("x")};
  signatures[0].*field = first;
  signatures[1].*field = second;
  world.submit_each({signatures[0], signatures[1]});
  world.round();
}

}  // namespace

TEST(disagreements_name_both_values_and_the_ranks) {
  for (const Disagreement& item : disagreements()) {
    World world(3);
    world.submit_each({item.first, item.first, item.second});
    CHECK(world.round());
    const std::string text = world.refusal({0, 1, 2}, SRT_MISMATCH);
    CHECK_EQUAL(text.substr(0, 24), "ranks disagree about 'x'");
    CHECK(contains(text, "rank 0 (pid 70 on hostA), rank 1 (pid 71 on hostA) have "));
    CHECK(contains(text, "rank 2 (pid 72 on hostA) has "));
    for (const char* part : item.parts) {
      if (!contains(text, part)) CHECK_EQUAL(std::string(item.about) + ": " + text, part);
    }
    CHECK(world.outcome(0).plans.empty());
  }
}

TEST(the_text_is_whole) {
  World world(2);
  world.submit_each({allreduce("grad.w", {2, 3}), allreduce("grad.w", {2, 4})});
  world.round();
  CHECK_EQUAL(world.refusal({0, 1}, SRT_MISMATCH),
              "ranks disagree about 'grad.w': rank 0 (pid 70 on hostA) has float32 of shape [2, 3], rank 1 (pid 71 on "
              "hostA) has float32 of shape [2, 4]; every rank must pass the same shape");
}

TEST(after_a_refusal_the_name_works_again) {
  World world(2);
  world.submit_each({allreduce("x", {1}), allreduce("x", {2})});
  world.round();
  for (int i = 0; i < 2; ++i) {
    world.submit_all(allreduce("x", {1}));
    world.round();
    CHECK_EQUAL(world.plans(0), "x");
    CHECK_EQUAL(world.plans(1), "x");
  }
}

TEST(a_cached_name_whose_properties_differ_is_a_mismatch_too) {
  World world(2);
  world.submit_all(allreduce("x", {1}));
  world.round();
  for (int32_t odd : {0, 1}) {
    world.submit(odd, allreduce("x", {2}));
    world.submit(1 - odd, allreduce("x", {1}));
    world.round();
    CHECK(contains(world.refusal({0, 1}, SRT_MISMATCH), "shape [2]"));
  }
  world.submit_all(allreduce("x", {1}));
  world.report(0);
  CHECK_EQUAL(world.last_report.present.size(), 1u);  // the cache has kept the agreed request
  world.report(1);
  CHECK(world.decide());
  CHECK_EQUAL(world.plans(1), "x");
}

TEST(different_kinds_under_one_name_are_a_mismatch) {
  World world(3);
  world.submit_each({allreduce("x"), broadcast("x")});
  CHECK(!world.round());
  world.submit(2, allgather("x", {4}));
  CHECK(world.round());
  const std::string text = world.refusal({0, 1, 2}, SRT_MISMATCH);
  for (const char* part : {"the kind all-reduce", "the kind broadcast", "the kind all-gather", "rank 2 (pid 72"}) {
    CHECK(contains(text, part));
  }
  world.submit_all(broadcast("x"));
  world.round();
  CHECK_EQUAL(world.plans(2), "x");
}

TEST(one_name_may_be_in_flight_once_a_kind) {
  World world(2);
  world.submit_all(allreduce("x"));
  world.submit_all(broadcast("x"));
  world.round();
  CHECK_EQUAL(world.outcome(0).plans.size(), 2u);
  world.submit(0, allreduce("x"));
  world.submit(0, broadcast("x"));
  CHECK(!world.round());
  world.submit(1, broadcast("x"));
  CHECK(world.round());
  world.submit(1, allreduce("x"));
  CHECK(world.round());
  CHECK_EQUAL(world.plans(0), "x");
}

TEST(a_root_outside_the_set_is_refused) {
  World world(3);
  world.submit_all(add_set({0, 1}));
  world.round();
  world.submit_from({0, 1}, in_set(broadcast("x", 2), 1));
  world.round();
  CHECK(contains(world.refusal({0, 1}, SRT_INVALID_ARGUMENT), "from rank 2, which is not a member of process set 1"));
  world.submit_from({0, 1}, in_set(broadcast("x", 1), 1));
  world.round();
  CHECK_EQUAL(world.plans(0), "x");
}

TEST(the_number_of_a_device_may_differ) {
  World world(2);
  submit_differing(world, &Signature::device, 0, 1);
  CHECK_EQUAL(world.plans(0), "x");
}

TEST(priorities_may_differ_and_the_highest_counts) {
  World world(2);
  submit_differing(world, &Signature::priority, 0, 10);
  REQUIRE(world.outcome(0).plans.size() == 1);
  CHECK_EQUAL(world.outcome(0).plans[0].tensors[0].signature->priority, 10);
}

TEST(texts_are_bounded_and_whole_characters) {
  const std::string name(1'000, 'n');
  std::string accents;
  while (accents.size() < longest_name - 1) accents += "\xc3\xa9";
  for (const std::string& long_name : {name, accents}) {
    World world(9);
    for (int32_t rank = 0; rank < 9; ++rank) {
      std::vector<int64_t> shape(most_dimensions, 1);
      shape[static_cast<size_t>(rank)] = 3;
      world.submit(rank, allreduce(long_name, shape));
    }
    world.round();
    const std::string text = world.refusal({0, 1, 2, 3, 4, 5, 6, 7, 8}, SRT_MISMATCH);
    CHECK(!text.empty() && text.size() <= 1'500);
    CHECK(contains(text, "and 5 more values"));
    CHECK(contains(text, "must pass the same shape"));
    CHECK(!contains(text, "\xc3."));
  }
}
