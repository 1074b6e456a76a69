#include "base/library.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>

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
  if (open(name, RTLD_NOLOAD)) return;
  for (size_t begin = 0; begin < folders.size() && !handle_;) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    if (end > begin) try_folder(folders.substr(begin, end - begin));
    begin = end + 1;
  }
  if (!handle_ && !open(name, 0)) looked_for_ += ", and the system says: " + loader_words();
}

std::string Library::absence() const { return name_ + " was not found: this program has not loaded it" + looked_for_; }

bool Library::open(const std::string& file, int more_flags) {
  handle_ = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | more_flags);
  if (handle_) path_ = path_of(handle_, file);
  return handle_ != nullptr;
}

void Library::try_folder(const std::string& folder) {
  const std::string file = folder + "/" + name_;
  if (open(file, 0)) return;
  const std::string words = loader_words();
  looked_for_ += ", " + (::access(file.c_str(), F_OK) == 0 ? words : "it is not in " + folder);
}

}  // namespace sirtaki
