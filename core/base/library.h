// A shared library that is opened at run time, so that nothing of it is needed to build or to install.
#pragma once

#include <dlfcn.h>

#include <string>
#include <string_view>

namespace sirtaki {

// What a library or the loader says, fit for one line of a message.
std::string one_line(std::string_view words);

// One library on its way from a name to its functions. It is never closed.
class Library {
 public:
  // A second copy beside the one that a framework uses would not know what that knows: what is loaded goes first, then
  // the `folders` (separated by colons), then the system's.
  explicit Library(const char* name, const std::string& folders = {});

  bool is_open() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }
  std::string absence() const;  // where it was looked for in vain

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
