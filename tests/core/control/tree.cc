// Ranks receive the same through a tree of any shape as they do without one.
#include <random>

#include "control/relay/tree.h"
#include "control_simulation.h"

using namespace sirtaki;

namespace {

// Returns an arbitrary tree: each rank reports to some lower rank.
std::vector<int32_t> random_parents(int32_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> parents{-1};
  for (int32_t rank = 1; rank < size; ++rank) {
    const int32_t nearest = seed % 3 == 0 ? std::max(0, rank - 2) : 0;  // some trees are deep
    parents.push_back(nearest + static_cast<int32_t>(random() % static_cast<uint32_t>(rank - nearest)));
  }
  return parents;
}

void simulate_trees(Mix mix, uint32_t first_seed, uint32_t runs = 40) {
  for (uint32_t capacity : {64u, 1u, 3u, 0u}) {
    mix.cache_capacity = capacity;
    for (uint32_t seed = first_seed + capacity * 1'000; seed < first_seed + capacity * 1'000 + check::seeds(runs);
         ++seed) {
      const int32_t size = 3 + static_cast<int32_t>(seed % 6);
      const int before = check::failures();
      const std::vector<int32_t> parents = random_parents(size, seed);
      Simulation(size, mix, seed, parents).run();
      if (check::failures() == before) continue;
      std::fprintf(stderr, "seed %u, cache of %u, parents %s\n", seed, capacity, check::show(parents).c_str());
      return;
    }
  }
}

// Compares the same program in a star and in a tree, Decision by Decision.
void compare(const Mix& mix, uint32_t first_seed, uint32_t runs = 60) {
  for (uint32_t seed = first_seed; seed < first_seed + check::seeds(runs); ++seed) {
    const int32_t size = 3 + static_cast<int32_t>(seed % 6);
    const int before = check::failures();
    const std::vector<int32_t> parents = random_parents(size, seed);
    const auto tree = Simulation(size, mix, seed, parents).run_in_rounds();
    const auto star = Simulation(size, mix, seed).run_in_rounds();
    CHECK_EQUAL(tree.size(), star.size());
    for (size_t round = 0; round < std::min(tree.size(), star.size()); ++round) CHECK_EQUAL(tree[round], star[round]);
    if (check::failures() == before) continue;
    std::fprintf(stderr, "seed %u, parents %s\n", seed, check::show(parents).c_str());
    return;
  }
}

}  // namespace

TEST(trees_decide_what_stars_decide) {
  compare({}, 10'000);
  compare({.absents = true, .ragged = true, .exchanges = true}, 11'000);
  compare({.dissents = true, .ragged = true, .exchanges = true}, 12'000);
  compare({.joins = true, .sets = true, .groups = true, .ragged = true}, 13'000);
  compare({.goodbyes = true, .sets = true, .exchanges = true}, 14'000);
}

TEST(plain_programs) { simulate_trees({}, 100'000); }
TEST(ragged_and_absent) { simulate_trees({.absents = true, .ragged = true}, 200'000); }
TEST(disagreeing_ranks) { simulate_trees({.dissents = true, .ragged = true, .exchanges = true}, 300'000); }
TEST(groups_whole_or_refused) { simulate_trees({.dissents = true, .groups = true}, 400'000); }
TEST(joining_ranks) { simulate_trees({.absents = true, .joins = true, .ragged = true, .exchanges = true}, 500'000); }
TEST(sets_coming_and_going) { simulate_trees({.sets = true, .ragged = true}, 600'000); }
TEST(leaving_ranks) { simulate_trees({.goodbyes = true, .sets = true, .ragged = true, .exchanges = true}, 700'000); }
TEST(everything_at_once) { simulate_trees(everything, 800'000); }
TEST(everything_while_waiting_is_reported) {
  Mix mix = everything;
  mix.stalls = true;
  simulate_trees(mix, 900'000);
}
