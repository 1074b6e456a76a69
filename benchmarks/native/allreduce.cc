// An all-reduce among many ranks on a fat tree, in virtual time, by the algorithm that the core chooses.
//
//   allreduce ranks=1024 each=8 bytes=67108864 gigabits=10 latency=30 rack=16 oversubscription=2 events=0
//
// events=1: the core's operations exchange frames over the virtual network (allreduce_world.h), for worlds that this
// machine's memory can hold. events=0: the core's schedule with modelled phases (allreduce_model.h). Prints one JSON
// object: the algorithm, the time in microseconds, and the frames and bytes that leave one host.
#include "allreduce_model.h"
#include "allreduce_world.h"

namespace {

using namespace virtual_network;

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::direct: return "direct";
    case Algorithm::ring: return "ring";
    case Algorithm::recursive_doubling: return "recursive doubling";
    case Algorithm::hierarchical: return "hierarchical";
  }
  return "";
}

}  // namespace

int main(int argument_count, char** arguments) {
  Numbers numbers = allreduce_numbers();
  numbers.add("events", 0);
  numbers.parse(argument_count, arguments);
  const bool is_local = is_on_one_host(numbers);
  uint8_t nothing = 0;
  const Algorithm algorithm = choose_for(*make_allreduce(numbers, 0, &nothing), hosts_of(numbers));
  const AllreduceResult result = numbers.get("events") ? AllreduceWorld(numbers).run() : AllreduceModel(numbers).run();
  std::printf("{\"algorithm\": \"%s\", \"microseconds\": %.1f, \"frames\": %lld, \"bytes\": %lld}\n",
              is_local ? "shared memory" : name_of(algorithm), static_cast<double>(result.took) / 1e3,
              static_cast<long long>(result.of_host.frames), static_cast<long long>(result.of_host.bytes));
}
