// This rank's links, by peer.
#pragma once

#include <memory>
#include <vector>

#include "transport/link.h"

namespace sirtaki {

class Links {
 public:
  explicit Links(int32_t size) : links_(static_cast<size_t>(size)) {}

  void add(int32_t peer, std::unique_ptr<BytePipe> pipe) {
    links_[static_cast<size_t>(peer)] = std::make_unique<Link>(std::move(pipe));
  }
  void remove(int32_t peer) { links_[static_cast<size_t>(peer)].reset(); }
  Link* to(int32_t peer) const { return links_[static_cast<size_t>(peer)].get(); }
  int32_t size() const { return static_cast<int32_t>(links_.size()); }

 private:
  std::vector<std::unique_ptr<Link>> links_;  // nullptr where there is none
};

}  // namespace sirtaki
