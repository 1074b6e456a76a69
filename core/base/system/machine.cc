#include "base/system/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string_view>

namespace sirtaki {
namespace {

// Reads up to two numbers at the beginning of a file; returns how many were read.
int read_numbers(const std::string& path, double& first, double& second) {
  FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return 0;
  const int count = std::fscanf(file, "%lf %lf", &first, &second);
  std::fclose(file);
  return std::max(count, 0);
}

// Returns a control group's CPU quota in cores, from the files of cgroup version 2 or 1; 0 if there is none.
double quota_of(const std::string& group) {
  double quota = 0, period = 0, none = 0;
  if (read_numbers(group + "/cpu.max", quota, period) == 2) return period > 0 ? quota / period : 0;  // "max 100000"
  const bool is_there = read_numbers(group + "/cpu.cfs_quota_us", quota, none) &&
                        read_numbers(group + "/cpu.cfs_period_us", period, none);
  return is_there && quota > 0 && period > 0 ? quota / period : 0;
}

// Returns the mount point of the control group in a line of /proc/self/cgroup ("0::/a/b", "5:cpu,cpuacct:/a"); "" if
// its controllers set no CPU quota. Sets `path` to the group's path.
std::string mount_of(std::string_view line, std::string& path) {
  const size_t controllers = line.find(':');
  const size_t group = controllers == line.npos ? line.npos : line.find(':', controllers + 1);
  if (group == line.npos) return "";
  path = line.substr(group + 1);
  const std::string list = "," + std::string(line.substr(controllers + 1, group - controllers - 1)) + ",";
  if (list == ",,") return "/sys/fs/cgroup";
  return list.find(",cpu,") == list.npos ? "" : "/sys/fs/cgroup/cpu";
}

}  // namespace

int usable_cores() {
  cpu_set_t cores;
  return cores_within_quotas(::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1, "");
}

int cores_within_quotas(int cores, const std::string& root) {
  double least = cores;
  std::ifstream memberships(root + "/proc/self/cgroup");
  for (std::string line, group; std::getline(memberships, line);) {
    const std::string mount = mount_of(line, group);
    while (!mount.empty()) {
      if (const double quota = quota_of(root + mount + group); quota > 0) least = std::min(least, quota);
      const size_t parent = group.rfind('/');
      if (parent == group.npos) break;
      group.resize(parent);
    }
  }
  return std::max(1, static_cast<int>(least));
}

int online_cores() { return std::max(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN))); }

int64_t page_bytes() { return ::sysconf(_SC_PAGESIZE); }

int64_t second_level_cache_bytes() {
  for (int index = 0;; ++index) {
    const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    double level = 0, kibibytes = 0, none = 0;
    if (!read_numbers(cache + "/level", level, none)) return 0;
    if (level == 2 && read_numbers(cache + "/size", kibibytes, none))  // "2048K"
      return static_cast<int64_t>(kibibytes) * 1024;
  }
}

}  // namespace sirtaki
