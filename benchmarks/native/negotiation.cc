// The cost of negotiation among many ranks, in virtual time (negotiating_world.h).
//
//   negotiation ranks=4096 each=8 fan_out=16 tensors=400 latency=30 gigabits=10 steps=5
//
// Every rank submits its tensors at the same moment, but `late` ranks do so `late_by` microseconds later; the latency
// is the time from the last submission until the last rank has the Decision. fan_out=0: no leaders. Prints one JSON
// object: the first step (requests in full), medians of the following steps (numbers of the response cache), and the
// lateness of ranks as [rank, times, longest]; bytes and frames are those of one step, times are in microseconds.
#include "negotiating_world.h"

namespace {

using namespace virtual_network;

double median_of(const std::vector<Cost>& steps, int64_t (*of)(const Cost&)) {
  std::vector<double> values;
  for (const Cost& step : steps) values.push_back(static_cast<double>(of(step)));
  return median(values);
}

void print(const char* name, const std::vector<Cost>& steps) {
  const auto of = [&](int64_t (*value)(const Cost&)) { return median_of(steps, value); };
  std::printf("\"%s\": {\"latency\": %.1f, \"processor\": %.1f", name,
              of([](const Cost& c) { return c.latency; }) / 1e3, of([](const Cost& c) { return c.processor; }) / 1e3);
  std::printf(", \"frames_in\": %.0f, \"bytes_in\": %.0f", of([](const Cost& c) { return c.received.frames; }),
              of([](const Cost& c) { return c.received.bytes; }));
  std::printf(", \"frames_out\": %.0f, \"bytes_out\": %.0f", of([](const Cost& c) { return c.sent.frames; }),
              of([](const Cost& c) { return c.sent.bytes; }));
  std::printf(", \"frames_of_all\": %.0f, \"bytes_of_all\": %.0f}, ", of([](const Cost& c) { return c.of_all.frames; }),
              of([](const Cost& c) { return c.of_all.bytes; }));
}

}  // namespace

int main(int argument_count, char** arguments) {
  Numbers numbers = world_numbers();
  numbers.parse(argument_count, arguments);
  NegotiatingWorld world(numbers);
  const Cost first = world.step();
  std::vector<Cost> steady;
  for (int64_t i = 0; i < numbers.get("steps"); ++i) steady.push_back(world.step());
  std::printf("{");
  print("first", {first});
  print("steady", steady);
  std::printf("\"lateness\": [");
  const char* separator = "";
  for (const auto& [rank, late] : world.lateness()) {
    std::printf("%s[%d, %lld, %.1f]", separator, rank, static_cast<long long>(late.times),
                in_seconds(late.longest) * 1e6);
    separator = ", ";
  }
  std::printf("]}\n");
}
