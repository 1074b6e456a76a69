// Operations that the calling thread waits for, as MPI's calls do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "native/call_status.h"
#include "sirtaki.h"

namespace sirtaki::bindings {

// One operation: a request, and what it refers to.
struct Transfer {
  Transfer(int32_t kind, std::string called, std::vector<int64_t> dimensions, int32_t dtype);

  srt_request request;
  std::string name;
  std::vector<int64_t> shape;
};

// Runs operations of this process's rank, and waits for all of them. The process may shut down meanwhile: then they
// fail. `number` receives the srt_result_number of the first.
CallStatus run(std::vector<Transfer> transfers, int64_t* number = nullptr);

}  // namespace sirtaki::bindings
