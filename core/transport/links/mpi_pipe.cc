#include "transport/links/mpi_pipe.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"

namespace sirtaki {

MpiPipe::~MpiPipe() {
  for (Pieces* side : {&out_, &in_})
    for (Piece& piece : side->all)
      if (piece.is_in_flight) std::ignore = piece.buffer.release();
}

ptrdiff_t MpiPipe::write(std::span<const uint8_t> bytes, bool more) {
  if (is_deaf_) return -1;
  reclaim();
  size_t taken = 0;
  while (!is_broken_ && taken < bytes.size()) {
    if (!filling_) {
      if (out_.count == pieces) break;
      filling_ = &out_.at(out_.count++);
      if (!filling_->buffer) filling_->buffer = std::make_unique_for_overwrite<uint8_t[]>(piece_bytes);
      filling_->bytes = 0;
    }
    const size_t count = std::min(bytes.size() - taken, piece_bytes - filling_->bytes);
    std::memcpy(filling_->buffer.get() + filling_->bytes, bytes.data() + taken, count);
    filling_->bytes += count;
    taken += count;
    if (filling_->bytes == piece_bytes && !send_filled()) break;
  }
  if (filling_ && !more && taken == bytes.size()) send_filled();
  return is_broken_ ? -1 : static_cast<ptrdiff_t>(taken);
}

bool MpiPipe::send_filled() {
  Piece& piece = *filling_;
  filling_ = nullptr;
  piece.is_in_flight = works(mpi_.issend(piece.buffer.get(), static_cast<int>(piece.bytes), mpi_.byte_type, peer_,
                                         mpi_.tag, mpi_.comm, piece.request.data()),
                             "MPI_Issend");
  if (piece.is_in_flight) ++sending_;
  return piece.is_in_flight;
}

// Takes back the oldest pieces that the peer has received.
void MpiPipe::reclaim() {
  while (!is_broken_ && sending_ && has_ended(out_.at(0))) {
    out_.drop_first();
    --sending_;
  }
}

ptrdiff_t MpiPipe::read(std::span<uint8_t> bytes) {
  receive_further();
  size_t taken = 0;
  while (taken < bytes.size() && in_.count && !in_.at(0).is_in_flight) {
    Piece& piece = in_.at(0);
    const size_t count = std::min(bytes.size() - taken, piece.bytes - piece.consumed);
    std::memcpy(bytes.data() + taken, piece.buffer.get() + piece.consumed, count);
    taken += count;
    piece.consumed += count;
    if (piece.consumed == piece.bytes) in_.drop_first();
  }
  return !taken && is_broken_ ? -1 : static_cast<ptrdiff_t>(taken);
}

// Receives the messages that have arrived, as far as there is room for them.
void MpiPipe::receive_further() {
  StatusOfMpi status;
  while (!is_broken_ && in_.count < pieces) {
    int is_there = 0, bytes = 0;
    if (!works(mpi_.iprobe(peer_, mpi_.tag, mpi_.comm, &is_there, &status), "MPI_Iprobe") || !is_there) break;
    if (!works(mpi_.get_count(&status, mpi_.byte_type, &bytes), "MPI_Get_count")) break;
    if (bytes < 1 || static_cast<size_t>(bytes) > piece_bytes) {
      fail(format("a message of %d bytes arrived, which no rank sends", bytes));
      break;
    }
    Piece& piece = in_.at(in_.count);
    if (!piece.buffer) piece.buffer = std::make_unique_for_overwrite<uint8_t[]>(piece_bytes);
    piece.bytes = static_cast<size_t>(bytes);
    piece.consumed = 0;
    const int code =
        mpi_.irecv(piece.buffer.get(), bytes, mpi_.byte_type, peer_, mpi_.tag, mpi_.comm, piece.request.data());
    if (!works(code, "MPI_Irecv")) break;
    piece.is_in_flight = true;
    ++in_.count;
  }
  for (size_t i = 0; i < in_.count && !is_broken_; ++i)
    if (in_.at(i).is_in_flight && !has_ended(in_.at(i))) break;
}

bool MpiPipe::has_ended(Piece& piece) {
  StatusOfMpi status;
  int is_over = 0;
  if (works(mpi_.test(piece.request.data(), &is_over, &status), "MPI_Test") && is_over) piece.is_in_flight = false;
  return !piece.is_in_flight;
}

bool MpiPipe::works(int code, const char* function) {
  if (code) fail(format("%s returned the error %d", function, code));
  return !code;
}

void MpiPipe::fail(std::string_view what) {
  is_broken_ = true;
  trouble_ = "MPI could not move data between it and this rank: " + std::string(what);
}

}  // namespace sirtaki
