// The cost of the flight recorder and the statistics: nanoseconds per operation, with everything that is recorded of
// it.
//
//   recorder      prints one JSON object: the median of many blocks, for steps of 1 and of 400 operations
#include <cstdio>
#include <string>
#include <vector>

#include "drivers.h"
#include "observe/observer.h"

namespace {

using namespace sirtaki;

constexpr int blocks = 201;
constexpr int operations_a_block = 4'000;

// Runs one step: its operations are submitted together, reported, decided in one plan, and end.
void step(Observer& observer, const std::vector<std::string>& names, uint64_t plan) {
  std::vector<uint64_t> numbers;
  numbers.reserve(names.size());
  observer.set_moment(now());
  for (const std::string& name : names) numbers.push_back(observer.submitted({name, "all-reduce", 0, 1024}));
  observer.set_moment(now());
  for (uint64_t number : numbers) observer.reported(number, true);
  observer.set_moment(now());
  for (uint64_t number : numbers) observer.decided(number, plan, numbers.size());
  observer.plan_begun(numbers.size(), 1024, 1024);
  observer.set_moment(now());
  for (uint64_t number : numbers) {
    observer.transferred(number, {});
    observer.ended(number, true, SRT_OK);
  }
  observer.plan_ended();
}

double nanoseconds_an_operation(int operations_a_step) {
  const Log log(-1);
  Timeline timeline(0, 1, "rank 0", log);
  Observer observer(2, 4'096, timeline);
  std::vector<std::string> names;
  for (int i = 0; i < operations_a_step; ++i) names.push_back("allreduce.model.layer." + std::to_string(i) + ".weight");
  std::vector<double> times;
  for (int block = 0; block < blocks; ++block) {
    const Nanoseconds start = now();
    for (int done = 0; done < operations_a_block; done += operations_a_step)
      step(observer, names, static_cast<uint64_t>(done));
    times.push_back(static_cast<double>(now() - start) / operations_a_block);
  }
  return median(times);
}

}  // namespace

int main() {
  std::printf("{\"one at a time\": %.1f, \"400 at a time\": %.1f}\n", nanoseconds_an_operation(1),
              nanoseconds_an_operation(400));
}
