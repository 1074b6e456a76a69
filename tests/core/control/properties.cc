// Properties that hold for any timing: every request is answered exactly once and alike on all ranks. The seeds are
// fixed; a failure prints its own.
#include "control_simulation.h"

using namespace sirtaki;

namespace {

void simulate(const Mix& mix, uint32_t first_seed, uint32_t runs = 40) {
  for (uint32_t seed = first_seed; seed < first_seed + check::seeds(runs); ++seed) {
    const int before = check::failures();
    Simulation(2 + static_cast<int32_t>(seed % 4), mix, seed).run();
    if (check::failures() == before) continue;
    std::fprintf(stderr, "seed %u, %u ranks, cache of %u\n", seed, 2 + seed % 4, mix.cache_capacity);
    return;
  }
}

// Simulates with room for all names in the cache, and with too little.
void simulate_with_caches(Mix mix, uint32_t seed) {
  for (uint32_t capacity : {64u, 1u, 2u, 3u, 4u, 0u}) {
    mix.cache_capacity = capacity;
    simulate(mix, seed + capacity * 1'000);
  }
}

}  // namespace

TEST(plain_programs) { simulate_with_caches({}, 100'000); }
TEST(ragged_and_absent) { simulate_with_caches({.absents = true, .ragged = true}, 200'000); }
TEST(disagreeing_ranks) { simulate_with_caches({.dissents = true, .ragged = true}, 300'000); }
TEST(exchanging_ranks) { simulate_with_caches({.dissents = true, .exchanges = true}, 350'000); }
TEST(exchanging_ranks_that_join) { simulate_with_caches({.joins = true, .exchanges = true}, 550'000); }
TEST(exchanging_ranks_that_leave) {
  simulate_with_caches({.goodbyes = true, .sets = true, .exchanges = true}, 750'000);
}
TEST(groups_whole_or_refused) { simulate_with_caches({.dissents = true, .groups = true}, 400'000); }
TEST(joining_ranks) { simulate_with_caches({.absents = true, .joins = true, .ragged = true}, 500'000); }
TEST(sets_coming_and_going) { simulate_with_caches({.sets = true, .ragged = true}, 600'000); }
TEST(leaving_ranks) { simulate_with_caches({.goodbyes = true, .ragged = true}, 700'000); }
TEST(everything_that_leaves_nobody) {
  Mix mix = everything;
  mix.goodbyes = false;
  simulate_with_caches(mix, 800'000);
}
TEST(everything) { simulate_with_caches(everything, 900'000); }

// Asking late ranks for their state, and reporting it, changes nothing else.
TEST(everything_while_waiting_is_reported) {
  Mix mix = everything;
  mix.stalls = true;
  simulate_with_caches(mix, 1'000'000);
  Simulation waiting(4, {.stalls = true}, 7);
  waiting.run();
  CHECK(waiting.stalls() > 0);
}
