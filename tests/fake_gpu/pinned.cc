#include "fake_gpu/pinned.h"

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>

#include "fake_gpu/fake.h"

namespace fake {
namespace {

struct Pinned {
  char* for_tasks;
  size_t bytes;
  HostMay may = HostMay::write;
  std::string task = {};
};

struct AllPinned {
  std::mutex mutex;
  std::map<char*, Pinned> blocks;  // by the host's address
  std::string early;  // the task of the first access that came too early
  struct sigaction before = {};
};

AllPinned& all() {
  static AllPinned* pinned = new AllPinned;
  return *pinned;
}

std::map<char*, Pinned>::iterator find(const void* address) {
  auto found = all().blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (found == all().blocks.begin()) return all().blocks.end();
  --found;
  return static_cast<const char*>(address) < found->first + found->second.bytes ? found : all().blocks.end();
}

void protect(char* address, const Pinned& block) {
  const int modes[] = {PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE};
  ::mprotect(address, block.bytes, modes[static_cast<int>(block.may)]);
}

// Keeps the host's access for report_early_access(), and lets it go on; allocates nothing, because it is a signal's
// handler. The handler before this one serves other addresses.
void on_fault(int signal, siginfo_t* info, void*) {
  const std::lock_guard lock(all().mutex);
  const auto found = find(info->si_addr);
  if (found == all().blocks.end()) {
    ::sigaction(signal, &all().before, nullptr);
    return;
  }
  Pinned& block = found->second;
  if (all().early.empty()) all().early.swap(block.task);
  block.may = HostMay::write;
  protect(found->first, block);
}

bool watch_faults() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  return ::sigaction(SIGSEGV, &action, &all().before) == 0;
}

}  // namespace

void* allocate_pinned(size_t bytes) {
  static const bool is_watching = watch_faults();
  if (!is_watching) std::abort();
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t size = (bytes + page - 1) / page * page;
  const int file = ::memfd_create("pinned", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) std::abort();
  void* views[2];
  for (void*& view : views) {
    view = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (view == MAP_FAILED) std::abort();
  }
  ::close(file);
  const std::lock_guard lock(all().mutex);
  all().blocks[static_cast<char*>(views[0])] = {static_cast<char*>(views[1]), size};
  return views[0];
}

void free_pinned(void* address) {
  const std::lock_guard lock(all().mutex);
  const auto found = find(address);
  ::munmap(found->second.for_tasks, found->second.bytes);
  ::munmap(address, found->second.bytes);
  all().blocks.erase(found);
}

void* for_tasks(const void* address) {
  const std::lock_guard lock(all().mutex);
  const auto found = find(address);
  if (found == all().blocks.end()) return const_cast<void*>(address);
  return found->second.for_tasks + (static_cast<const char*>(address) - found->first);
}

void protect_pinned(void* address, HostMay may, const std::string& task) {
  const std::lock_guard lock(all().mutex);
  Pinned& block = find(address)->second;
  block.task = task;
  if (block.may == may) return;
  block.may = may;
  protect(static_cast<char*>(address), block);
}

void report_early_access() {
  std::string task;
  {
    const std::lock_guard lock(all().mutex);
    task.swap(all().early);
  }
  if (!task.empty()) misuse("the host", "it uses pinned memory in no order with a task: " + task, 0);
}

}  // namespace fake
