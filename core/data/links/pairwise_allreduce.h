// All-reduce by pairwise exchange: each rank sends every other rank that rank's slice, reduces its own slice, and sends
// the result to all. These are the two phases of Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
// Operations in MPICH" (2005), with all pairs at once. The derived classes define the bytes on the wire.
#pragma once

#include <span>
#include <vector>

#include "data/links/link_operation.h"

namespace sirtaki {

class PairwiseAllreduce : public LinkOperation {
 protected:
  // `bytes_each`: of one member's slice in a round.
  PairwiseAllreduce(const LinkSetting& setting, TransferPtr t, int64_t bytes_each);

  // A member's slice of a round, in bytes of the buffer.
  struct Part {
    int64_t begin, end;
  };

 private:
  // Returns the next position at or after this one where a slice may begin or end.
  virtual int64_t border(int64_t position) const { return position; }
  // Returns the size of a part's frames.
  virtual int64_t wire_bytes(const Part& part) const { return part.end - part.begin; }
  // Sends this rank's values of another member's slice, and the result of its own slice.
  virtual void send_slice(size_t member, int64_t tag, const Part& part) = 0;
  virtual void send_result(size_t member, int64_t tag, const Part& part) = 0;
  // Reduces the bodies of all other members' frames and this rank's values.
  virtual void reduce_slice(std::span<const uint8_t* const> bodies, const Part& part) = 0;
  // Receives the result of another member's slice.
  virtual Status take_result(size_t member, int64_t tag, const Part& part, bool& is_here) = 0;

  Status step(int64_t index, bool& finished) final;
  bool is_round(int64_t round) const { return round >= 0 && round < rounds_; }
  Part part_of(size_t member, int64_t round) const;
  bool send_slices_of(int64_t round);
  Status reduce_own_of(int64_t round, bool& finished);
  bool send_result_of(int64_t round);
  Status take_results_of(int64_t round, bool& finished);

  int64_t round_bytes_, rounds_ = 0;
  std::vector<const uint8_t*> bodies_;  // by member
  std::vector<int64_t> got_;  // by member: rounds whose result has arrived
};

}  // namespace sirtaki
