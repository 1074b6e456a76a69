// The search for libcuda and libnccl, and the errors about libraries that cannot be used.
#include "gpu/libraries/libraries.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "fake_gpu/control.h"

using namespace sirtaki;

namespace {

const std::string folder = SIRTAKI_FAKE_GPU;

GpuLibraries look_in(const std::string& folders) {
  Config config;
  CHECK(config.set("gpu_libraries", folders).is_ok());
  return GpuLibraries(config);
}

void check_contains(const std::string& text, const std::string& part) {
  if (!contains(text, part)) check::fail(__FILE__, __LINE__, "'" + text + "' has no '" + part + "'");
}

}  // namespace

TEST(they_are_found_in_a_folder_of_the_setting) {
  const GpuLibraries found = look_in("/nowhere::" + folder);
  CHECK(found.has_cuda() && found.has_nccl());
  CHECK_EQUAL(found.found_cuda().version, 12080);
  CHECK_EQUAL(found.found_nccl().version, 22803);
  CHECK_EQUAL(found.found_cuda().text, "libcuda 12.8 from " + folder + "/libcuda.so.1");
  CHECK_EQUAL(found.found_nccl().text, "libnccl 2.28.3 from " + folder + "/libnccl.so.2");
  CHECK_EQUAL(found.found_nccl().path, folder + "/libnccl.so.2");
  CHECK_EQUAL(found.device_count(), 2);
  int count = 0;
  CHECK_EQUAL(found.cuda().device_count(&count), cuda_success);
  CHECK_EQUAL(count, 2);
}

TEST(what_the_program_has_loaded_goes_first) {
  const FakeGpu loaded(folder);
  const GpuLibraries found = look_in("/nowhere");
  CHECK_EQUAL(found.found_cuda().path, folder + "/libcuda.so.1");
}

TEST(what_the_program_has_loaded_is_refused_if_it_is_incomplete) {
  std::ignore = ::dlopen((folder + "/incomplete/libnccl.so.2").c_str(), RTLD_NOW);
  const GpuLibraries found = look_in(folder);
  CHECK_EQUAL(found.found_nccl().path, folder + "/incomplete/libnccl.so.2");
  CHECK(!found.has_nccl());
}

TEST(a_library_of_the_setting_that_is_passed_over_is_told) {
  std::ignore = ::dlopen((folder + "/libnccl.so.2").c_str(), RTLD_NOW);
  const GpuLibraries found = look_in("/nowhere:" + folder + "/incomplete:" + folder);
  CHECK_EQUAL(found.found_nccl().text, "libnccl 2.28.3 from " + folder +
                                           "/libnccl.so.2 (which this program had loaded already; LD_PRELOAD=" +
                                           folder + "/incomplete/libnccl.so.2 loads that instead)");
  CHECK_EQUAL(look_in(folder).found_nccl().text, "libnccl 2.28.3 from " + folder + "/libnccl.so.2");
}

TEST(what_is_not_there_is_told_with_all_places) {
  const GpuLibraries found = look_in("/nowhere:/else where");
  // A machine with a GPU has the real libraries.
  CHECK_EQUAL(found.found_cuda().path.empty(), ::dlopen("libcuda.so.1", RTLD_NOW) == nullptr);
  for (const LibraryFound* one : {&found.found_cuda(), &found.found_nccl()}) {
    if (!one->path.empty()) continue;
    CHECK_EQUAL(one->version, 0);
    check_contains(one->text,
                   " was not found: this program has not loaded it, it is not in /nowhere, it is not in "
                   "/else where, and the system says: ");
  }
  if (!found.has_cuda()) CHECK(!found.has_nccl());
}

TEST(a_file_that_is_no_library_is_told_and_passed_over) {
  const std::string broken =
      std::filesystem::temp_directory_path() / ("sirtaki-gpu-libraries-" + std::to_string(::getpid()));
  REQUIRE(std::filesystem::create_directory(broken));
  std::ofstream(broken + "/libcuda.so.1") << "This is not a library, whatever its name may say of it.\n";
  const bool passed_over = look_in(broken + ":" + folder).found_cuda().path == folder + "/libcuda.so.1";
  std::filesystem::remove_all(broken);
  CHECK(passed_over);
}

TEST(a_library_without_a_function_is_refused_by_its_name) {
  const GpuLibraries found = look_in(folder + "/incomplete:" + folder);
  CHECK(found.has_cuda() && !found.has_nccl());
  check_contains(found.found_nccl().text,
                 folder + "/incomplete/libnccl.so.2 cannot be used: it has no ncclCommFinalize, ncclReduce; install");
}

TEST(a_driver_has_batches_of_copies) { CHECK(look_in(folder).cuda().copy_batch); }

TEST(an_older_driver_has_no_batches_of_copies) {
  const GpuLibraries found = look_in(folder + "/older:" + folder);
  CHECK(found.has_cuda() && found.has_nccl());
  CHECK_EQUAL(found.found_cuda().path, folder + "/older/libcuda.so.1");
  CHECK(!found.cuda().copy_batch);
}

TEST(an_old_nccl_is_refused) {
  const FakeGpu fake(folder);
  fake.set("nccl_version", 21805);
  const GpuLibraries found = look_in(folder);
  CHECK(found.has_cuda() && !found.has_nccl());
  check_contains(found.found_nccl().text, "libnccl 2.18.5 from " + folder + "/libnccl.so.2 is too old; install");
  fake.set("nccl_version", 2804);
  check_contains(look_in(folder).found_nccl().text, "libnccl 2.8.4 from ");
}

TEST(a_driver_without_a_gpu_is_refused) {
  const FakeGpu fake(folder);
  fake.set("devices", 0);
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  const GpuLibraries found = look_in(folder);
  CHECK(!found.has_cuda() && !found.has_nccl());
  CHECK_EQUAL(found.found_cuda().text, "libcuda 12.8 from " + folder +
                                           "/libcuda.so.1, but no GPU: no CUDA-capable device is detected (error "
                                           "100); CUDA_VISIBLE_DEVICES is ''");
  CHECK_EQUAL(found.found_cuda().path, folder + "/libcuda.so.1");
  CHECK_EQUAL(found.found_nccl().version, 22803);
  fake.set("devices", 2);
  fake.set("init_result", 803);
  check_contains(look_in(folder).found_cuda().text, "but no GPU: an error without a name (error 803)");
}

TEST(results_become_statuses) {
  const GpuLibraries found = look_in(folder);
  CHECK(found.check(cuda_success, "copying").is_ok());
  CHECK_EQUAL(found.check(cuda_out_of_memory, "allocating").code(), SRT_OUT_OF_MEMORY);
  const Status failed = found.check(700, "copying 'loss'");
  CHECK_EQUAL(failed.code(), SRT_DEVICE);
  CHECK_EQUAL(std::string(failed.text()),
              "copying 'loss' failed; CUDA says: an illegal memory access was encountered (error 700)");
  CHECK(found.check_nccl(nccl_success, "summing").is_ok());
  CHECK(found.check_nccl(nccl_in_progress, "summing").is_ok());
  CHECK_EQUAL(found.nccl().finalize(nullptr), 4);
  CHECK_EQUAL(std::string(found.check_nccl(4, "ending").text()),
              "ending failed; NCCL says: invalid argument (result 4): there is no such communicator");
}
