// A map from a framework's dtype numbers to rows of the core's dtype table.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

#include "sirtaki.h"

namespace sirtaki::bindings {

class DTypeMap {
 public:
  // `names`: pairs of a framework's dtype number and the dtype's name in the core's table.
  template <typename Pairs>
  explicit DTypeMap(const Pairs& names) {
    for (const auto& [number, name] : names)
      for (int32_t i = 0; i < srt_dtype_count(); ++i)
        if (srt_dtype entry; srt_dtype_get(i, &entry) == SRT_OK && std::string_view(entry.name) == name)
          entries_[static_cast<int32_t>(number)] = entry;
  }

  // Returns nullptr for a dtype that the core cannot exchange.
  const srt_dtype* find(int32_t number) const {
    const auto found = entries_.find(number);
    return found == entries_.end() ? nullptr : &found->second;
  }

 private:
  std::map<int32_t, srt_dtype> entries_;
};

}  // namespace sirtaki::bindings
