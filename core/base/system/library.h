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
  // Returns the file of `folders` that was not opened because the program had loaded another one; "" if there is none.
  const std::string& passed_over() const { return passed_over_; }
  std::string absence() const;  // the locations that were searched

  template <typename Function>
  void find(const char* symbol, Function*& out) {
    find_if_there(symbol, out);
    if (!out) missing_ += (missing_.empty() ? "" : ", ") + std::string(symbol);
  }
  template <typename Function>
  void find_if_there(const char* symbol, Function*& out) {
    out = reinterpret_cast<Function*>(::dlsym(handle_, symbol));
  }
  const std::string& missing() const { return missing_; }
  std::string incompleteness() const { return path_ + " cannot be used: it has no " + missing_; }

 private:
  bool open(const std::string& file, int more_flags);
  bool try_folder(const std::string& folder);
  bool pass_over(const std::string& folder);

  std::string name_, path_, passed_over_, looked_for_, missing_;
  void* handle_ = nullptr;
};

}  // namespace sirtaki
