// Settings, failures that tests ask for, and the record of misuse.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "fake_gpu/fake.h"
#include "fake_gpu/pinned.h"

namespace {

const std::map<std::string, int> defaults = {{"devices", 2},
                                             {"parts", 1},
                                             {"cuda_version", 12080},
                                             {"nccl_version", 22803},
                                             {"init_result", 0},
                                             {"delay", 50},
                                             {"seed", 1},
                                             {"polls", 3},
                                             {"hang", 0},
                                             {"init_hang", 0},
                                             {"capturing", 0},
                                             {"memory", 0},
                                             {"implicit_waits", 0},
                                             {"free_limit", 20'000}};

struct Failure {
  std::string function;
  int calls_until;
  int result;
};

struct Control {
  Control() { reset(); }

  void reset() {
    failures.clear();
    calls.clear();
    copied = 0;
    misuse.clear();
    held.clear();
    released.notify_all();
    broken = 0;
    for (const auto& [name, value] : defaults) {
      std::string variable = "SIRTAKI_FAKE_" + name;
      std::transform(variable.begin(), variable.end(), variable.begin(),
                     [](unsigned char c) { return std::toupper(c); });
      const char* given = std::getenv(variable.c_str());
      values[name] = given ? std::atoi(given) : value;
    }
    if (const char* given = std::getenv("SIRTAKI_FAKE_FAIL")) {
      const std::string text = given;
      const size_t first = text.find(':'), second = text.find(':', first + 1);
      if (second != std::string::npos)
        failures.push_back({text.substr(0, first), std::atoi(&text[first + 1]), std::atoi(&text[second + 1])});
    }
    random.seed(static_cast<unsigned>(values["seed"]));
  }

  std::mutex mutex;
  std::map<std::string, int> values, calls;
  std::vector<Failure> failures;
  std::set<std::string> held;
  std::condition_variable released;
  std::string misuse;
  long long copied = 0;  // bytes
  std::mt19937 random;
  int broken = 0;  // the result of every CUDA function from now on
  pid_t process = 0;  // that has initialised CUDA
};

// Returns the controls. They are never destroyed: threads of streams live on while the process ends.
Control& control() {
  static Control* all = new Control;
  return *all;
}

constexpr int not_initialized = 3;

bool breaks_the_context(int result) { return result >= 700 && result < 720; }

}  // namespace

namespace fake {

int setting(const std::string& name) {
  const std::lock_guard lock(control().mutex);
  return control().values.at(name);
}

int random_up_to(int most) {
  const std::lock_guard lock(control().mutex);
  return most > 0 ? static_cast<int>(control().random() % static_cast<unsigned>(most + 1)) : 0;
}

int enter(const char* function) {
  std::unique_lock lock(control().mutex);
  ++control().calls[function];
  const auto is_free = [&] { return !control().held.contains(function); };
  if (!control().released.wait_for(lock, std::chrono::milliseconds(control().values.at("free_limit")), is_free))
    control().misuse = std::string(function) + ": it was held for too long";
  const bool is_cuda = std::string_view(function).starts_with("cu");
  if (is_cuda && control().broken) return control().broken;
  const pid_t process = ::getpid();
  if (is_cuda && control().process && control().process != process) return not_initialized;
  if (std::string_view(function) == "cuInit") control().process = process;
  for (Failure& failure : control().failures)
    if (failure.function == function && --failure.calls_until == 0) {
      if (is_cuda && breaks_the_context(failure.result)) control().broken = failure.result;
      return failure.result;
    }
  return 0;
}

void count_copied(size_t bytes) {
  const std::lock_guard lock(control().mutex);
  control().copied += static_cast<long long>(bytes);
}

int misuse(const char* function, const std::string& what, int result) {
  const std::lock_guard lock(control().mutex);
  if (control().misuse.empty()) control().misuse = std::string(function) + ": " + what;
  return result;
}

}  // namespace fake

extern "C" {

void fake_gpu_set(const char* setting, int value) {
  const std::lock_guard lock(control().mutex);
  control().values.at(setting) = value;
  control().random.seed(static_cast<unsigned>(control().values["seed"]));
}

void fake_gpu_fail(const char* function, int nth, int result) {
  const std::lock_guard lock(control().mutex);
  control().failures.push_back({function, nth, result});
}

void fake_gpu_hold_calls(const char* function, int held) {
  const std::lock_guard lock(control().mutex);
  if (held) control().held.insert(function);
  else control().held.erase(function);
  control().released.notify_all();
}

int fake_gpu_calls(const char* function) {
  const std::lock_guard lock(control().mutex);
  return control().calls[function];
}

long long fake_gpu_copied() {
  const std::lock_guard lock(control().mutex);
  return control().copied;
}

const char* fake_gpu_misuse() {
  fake::report_early_access();
  const std::lock_guard lock(control().mutex);
  return control().misuse.c_str();
}

void fake_gpu_reset() {
  fake::report_early_access();
  const std::lock_guard lock(control().mutex);
  control().reset();
}

}  // extern "C"
