// What a rank was doing when its job failed, as a file in JSON: what is in flight, what came before, and where the
// program is. Written by the core, which needs no interpreter for it.
#pragma once

#include <string>

#include "base/knobs.h"
#include "base/log.h"
#include "context/handle_table.h"
#include "context/watch.h"
#include "observe/program_stack.h"

namespace sirtaki {

class FailureReport {
 public:
  // Nothing is ever written without the setting dump_directory.
  FailureReport(int32_t rank, const std::vector<RankPlace>& places, const Config& config, const Log& log);

  // Removes what an earlier world of this rank has left, so that it is not taken for this one's.
  void forget() const;
  bool is_wanted() const { return !path_.empty(); }
  void write(const AbortNotice& why, const StackSample& stack, HandleTable& handles) const;

 private:
  std::string describe(const AbortNotice& why, const StackSample& stack, HandleTable& handles) const;

  int32_t rank_;
  const std::vector<RankPlace>& places_;
  const Log& log_;
  std::string directory_, path_;
};

}  // namespace sirtaki
