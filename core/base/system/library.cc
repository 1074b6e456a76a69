#include "base/system/library.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/text.h"

namespace sirtaki {
namespace {

constexpr size_t longest_words = 600;

std::string loader_words() {
  const char* words = ::dlerror();
  return one_line(words ? words : "no reason was given");
}

std::string path_of(void* handle, const std::string& opened_as) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name && *map->l_name) return map->l_name;
  return opened_as;
}

}  // namespace

std::string one_line(std::string_view words) {
  std::string line = printable(words, longest_words);
  std::replace(line.begin(), line.end(), '\n', ' ');
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

Library::Library(const char* name, const std::string& folders) : name_(name) {
  const bool was_loaded = open(name, RTLD_NOLOAD);
  for (size_t begin = 0, end = 0; begin < folders.size(); begin = end + 1) {
    end = std::min(folders.find(':', begin), folders.size());
    const std::string folder = folders.substr(begin, end - begin);
    if (!folder.empty() && (was_loaded ? pass_over(folder) : try_folder(folder))) return;
  }
  if (!handle_ && !open(name, 0)) looked_for_ += ", and the system says: " + loader_words();
}

std::string Library::absence() const { return name_ + " was not found: this program has not loaded it" + looked_for_; }

bool Library::open(const std::string& file, int more_flags) {
  handle_ = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | more_flags);
  if (handle_) path_ = path_of(handle_, file);
  return handle_ != nullptr;
}

bool Library::try_folder(const std::string& folder) {
  const std::string file = folder + "/" + name_;
  if (open(file, 0)) return true;
  const std::string words = loader_words();
  looked_for_ += ", " + (::access(file.c_str(), F_OK) == 0 ? words : "it is not in " + folder);
  return false;
}

// Returns whether the folder has the library.
bool Library::pass_over(const std::string& folder) {
  const std::string file = folder + "/" + name_;
  if (::access(file.c_str(), F_OK) != 0) return false;
  std::error_code unknown;
  if (!std::filesystem::equivalent(file, path_, unknown)) passed_over_ = file;
  return true;
}

}  // namespace sirtaki
