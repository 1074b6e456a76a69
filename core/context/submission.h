// From a caller's request to an entry of the handle table: everything that one rank can check by itself.
#pragma once

#include "base/status.h"
#include "context/handle_table.h"
#include "sirtaki.h"

namespace sirtaki {

Status make_entry(const srt_request& request, int32_t world_size, HandleTable& handles, Entry& out);

}  // namespace sirtaki
