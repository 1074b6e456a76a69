// The number of cores that a process may use, from the files of control groups of both versions.
#include "base/system/machine.h"

#include <filesystem>
#include <fstream>

#include "check.h"

using namespace sirtaki;

namespace {

struct File {
  std::string path, text;
};

// Returns the usable cores out of 8, in a system that consists of these files.
int cores_with(const std::vector<File>& files) {
  std::string folder = std::filesystem::temp_directory_path() / ("sirtaki-machine-" + std::string(6, 'X'));
  CHECK(::mkdtemp(folder.data()) != nullptr);
  for (const auto& [path, text] : files) {
    const std::filesystem::path whole = folder + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text << "\n";
  }
  const int cores = cores_within_quotas(8, folder);
  std::filesystem::remove_all(folder);
  return cores;
}

const std::string groups = "/sys/fs/cgroup";
const File at_root{"/proc/self/cgroup", "0::/"};

}  // namespace

TEST(a_quota_of_version_2_counts) {
  CHECK_EQUAL(cores_with({}), 8);
  CHECK_EQUAL(cores_with({at_root, {groups + "/cpu.max", "300000 100000"}}), 3);
  CHECK_EQUAL(cores_with({at_root, {groups + "/cpu.max", "150000 100000"}}), 1);
  CHECK_EQUAL(cores_with({at_root, {groups + "/cpu.max", "50000 100000"}}), 1);
  CHECK_EQUAL(cores_with({at_root, {groups + "/cpu.max", "max 100000"}}), 8);
  CHECK_EQUAL(cores_with({at_root, {groups + "/cpu.max", "nonsense"}}), 8);
}

TEST(a_quota_of_a_parent_counts) {
  CHECK_EQUAL(cores_with({{"/proc/self/cgroup", "0::/a/b"}, {groups + "/a/cpu.max", "200000 100000"}}), 2);
  CHECK_EQUAL(cores_with({{"/proc/self/cgroup", "0::/not/visible"}, {groups + "/cpu.max", "200000 100000"}}), 2);
}

TEST(a_quota_of_version_1_counts) {
  const std::string job = groups + "/cpu/job/cpu.cfs_";
  const File membership{"/proc/self/cgroup", "1:memory:/job\n5:cpu,cpuacct:/job\n4:cpuset:/"};
  CHECK_EQUAL(cores_with({membership, {job + "quota_us", "400000"}, {job + "period_us", "100000"}}), 4);
  CHECK_EQUAL(cores_with({membership, {job + "quota_us", "-1"}, {job + "period_us", "100000"}}), 8);
  CHECK_EQUAL(cores_with({{"/proc/self/cgroup", "4:cpuset:/job"}, {job + "quota_us", "400000"}}), 8);
}
