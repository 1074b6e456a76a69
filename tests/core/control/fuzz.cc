// Runs each target of tests/fuzz on its seeds, and on the inputs that fuzzing has found before (tests/fuzz/corpus).
#include <filesystem>
#include <fstream>
#include <iterator>

#include "fuzz/targets.h"

using namespace sirtaki;

namespace {

void run(const fuzz::Target& target) {
  const std::vector<Bytes> seeds = target.seeds();
  CHECK(!seeds.empty());
  for (const Bytes& seed : seeds) {
    for (size_t length = 0; length <= seed.size(); ++length) target.run(std::span(seed).first(length));
    for (size_t at = 0; at < seed.size(); ++at) {
      Bytes changed = seed;
      changed[at] ^= static_cast<uint8_t>(1u << at % 8);
      target.run(changed);
    }
  }
  const std::filesystem::path folder = std::filesystem::path(SIRTAKI_FUZZ_CORPUS) / target.name;
  if (!std::filesystem::is_directory(folder)) return;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const Bytes found{std::istreambuf_iterator<char>(file), {}};
    target.run(found);
  }
}

}  // namespace

TEST(reports) { run(fuzz::report); }
TEST(decisions) { run(fuzz::decision); }
TEST(aggregates) { run(fuzz::aggregate); }
TEST(relays) { run(fuzz::relay); }
TEST(negotiators) { run(fuzz::negotiator); }
TEST(coordinators) { run(fuzz::coordinator); }
TEST(links) { run(fuzz::link); }
TEST(requests) { run(fuzz::request); }
