// Conversion of a caller's request to an entry of the handle table, with all checks that one rank can make by itself.
#pragma once

#include "base/status.h"
#include "context/handle_table.h"
#include "context/process_set_table.h"
#include "sirtaki.h"

namespace sirtaki {

// The rank that makes a request. The handle table's lock guards it.
struct Caller {
  int32_t rank, world_size;
  ProcessSetTable& sets;
  HandleTable& handles;
};

Status make_entry(const srt_request& request, const Caller& caller, HandleEntry& out);

}  // namespace sirtaki
