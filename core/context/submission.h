// From a caller's request to an entry of the handle table: everything that one rank can check by itself.
#pragma once

#include "base/status.h"
#include "context/handle_table.h"
#include "context/known_sets.h"
#include "sirtaki.h"

namespace sirtaki {

// Where the request is made. Under the handle table's lock.
struct Caller {
  int32_t rank, world_size;
  KnownSets& sets;
  HandleTable& handles;
};

Status make_entry(const srt_request& request, const Caller& caller, HandleEntry& out);

}  // namespace sirtaki
