// Writes the seeds of each target into FOLDER/<target>, where libFuzzer begins.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "targets.h"

int main(int count, char** arguments) {
  if (count != 2) return std::fprintf(stderr, "usage: fuzz_seeds FOLDER\n"), 2;
  for (const sirtaki::fuzz::Target* target : sirtaki::fuzz::targets) {
    const std::filesystem::path folder = std::filesystem::path(arguments[1]) / target->name;
    std::filesystem::create_directories(folder);
    size_t number = 0;
    for (const sirtaki::Bytes& seed : target->seeds()) {
      std::ofstream file(folder / ("seed" + std::to_string(number++)), std::ios::binary);
      file.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
      if (!file.flush()) return std::fprintf(stderr, "cannot write to %s\n", folder.c_str()), 1;
    }
  }
}
