// The tensors that share a plan, and the order of plans.
#include <algorithm>

#include "control_world.h"

using namespace sirtaki;

namespace {

// Returns the plans of a world of two that submits all of these at once.
std::string fused(const std::vector<Signature>& signatures, int64_t threshold = 1'000) {
  World world(2, {.fusion_threshold = threshold});
  for (const Signature& signature : signatures) world.submit_all(signature);
  world.round();
  CHECK_EQUAL(world.plans(0), world.plans(1));
  return world.plans(0);
}

}  // namespace

TEST(tensors_fuse_in_the_order_of_their_names) {
  CHECK_EQUAL(fused({allreduce("c"), allreduce("a"), allreduce("b")}), "a b c");
}

TEST(higher_priorities_leave_first) {
  const Signature urgent = changed(allreduce("z"), [](Signature& s) { s.priority = 2; });
  const Signature other = changed(allreduce("y"), [](Signature& s) { s.priority = -1; });
  CHECK_EQUAL(fused({other, allreduce("a"), urgent}), "z a y");
  CHECK_EQUAL(fused({other, allreduce("a"), urgent}, 0), "z | a | y");
}

TEST(a_plan_holds_at_most_the_threshold) {
  CHECK_EQUAL(fused({allreduce("a"), allreduce("b"), allreduce("c")}, 32), "a b | c");
  CHECK_EQUAL(fused({allreduce("a"), allreduce("b"), allreduce("c")}, 47), "a b | c");
  CHECK_EQUAL(fused({allreduce("a"), allreduce("b"), allreduce("c")}, 48), "a b c");
}

TEST(a_large_tensor_has_its_own_plan) {
  CHECK_EQUAL(fused({allreduce("a"), allreduce("b", {999}), allreduce("c")}), "a c | b");
}

TEST(no_threshold_is_no_fusion) { CHECK_EQUAL(fused({allreduce("a"), allreduce("b")}, 0), "a | b"); }

TEST(only_what_is_alike_fuses) {
  const Signature a = allreduce("a");
  const Signature b = allreduce("b");
  CHECK_EQUAL(fused({a, b}), "a b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.dtype = DType::float16; })}), "a | b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.reduce_op = ReduceOp::average; })}), "a | b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.prescale = 2; })}), "a | b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.postscale = 2; })}), "a | b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.wire_format = WireFormat::int8; })}), "a | b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.device = 0; })}), "a | b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.layout = 9; })}), "a b");
  CHECK_EQUAL(fused({a, changed(b, [](Signature& s) { s.root = 1; })}), "a | b");  // the root has no meaning there
  CHECK_EQUAL(fused({a, broadcast("b")}), "a | b");
  CHECK_EQUAL(fused({broadcast("a", 0), broadcast("b", 1)}), "a | b");
  const Signature bytes = changed(broadcast("b", 1), [](Signature& s) { s.dtype = DType::int8; });
  CHECK_EQUAL(fused({broadcast("a", 1), bytes}), "a b");
}

TEST(gathers_are_fused_and_barriers_stay_alone) {
  CHECK_EQUAL(fused({allgather("a", {2}), allgather("b", {2}), barrier("c"), barrier("d")}), "a b | c | d");
}

TEST(mixed_kinds_fuse_across_one_another) {
  CHECK_EQUAL(fused({allreduce("a"), broadcast("b"), allreduce("c"), broadcast("d"), barrier("e")}), "a c | b d | e");
}

TEST(the_order_of_submission_does_not_matter) {
  std::vector<Signature> signatures{allreduce("a"), allreduce("b", {100}), allreduce("c", {200}),
                                    broadcast("d"), allgather("e", {3}),   allreduce("f", {90})};
  const std::string expected = fused(signatures);
  const auto by_name = [](const Signature& a, const Signature& b) { return a.name < b.name; };
  while (std::next_permutation(signatures.begin(), signatures.end(), by_name)) CHECK_EQUAL(fused(signatures), expected);
}

TEST(sets_never_share_a_plan_and_numbers_ascend_over_all) {
  World world(2);
  world.submit_all(add_set({0}));
  world.round();
  uint64_t last = 0;
  for (int i = 0; i < 3; ++i) {
    world.submit_all(allreduce("a"));
    world.submit(0, in_set(allreduce("b"), 1));
    world.round();
    CHECK_EQUAL(world.plans(0), "a | b");
    CHECK_EQUAL(world.plans(1), "a");
    for (const Plan& plan : world.outcome(0).plans) CHECK_EQUAL(plan.number, ++last);
    CHECK_EQUAL(world.outcome(0).plans[1].members, std::vector<int32_t>{0});
    CHECK_EQUAL(world.outcome(0).plans[1].process_set, 1);
  }
}
