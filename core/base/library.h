// A shared library that is opened at run time, so that it is not needed to build or to install.
#pragma once

#include <dlfcn.h>

#include <string>
#include <string_view>

namespace sirtaki {

// Returns a message of a library or of the loader, shortened and on one line.
std::string one_line(std::string_view words);

// A library opened by name, and its functions. It is never closed.
class Library {
 public:
  // Opens a library: the loaded copy first, then those in `folders` (separated by colons), then the system's. A second
  // copy would not share the state of the copy that a framework uses.
  explicit Library(const char* name, const std::string& folders = {});

  bool is_open() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }
  std::string absence() const;  // the locations that were searched

  template <typename Function>
  void find(const char* symbol, Function*& out) {
    out = reinterpret_cast<Function*>(::dlsym(handle_, symbol));
    if (!out) missing_ += (missing_.empty() ? "" : ", ") + std::string(symbol);
  }
  const std::string& missing() const { return missing_; }
  std::string incompleteness() const { return path_ + " cannot be used: it has no " + missing_; }

 private:
  bool open(const std::string& file, int more_flags);
  void try_folder(const std::string& folder);

  std::string name_, path_, looked_for_, missing_;
  void* handle_ = nullptr;
};

}  // namespace sirtaki
