// A pipe over which the program's MPI library moves the bytes: messages of one peer, under one tag of a communicator of
// sirtaki's own. MPI has no descriptor to sleep on, so a rank that uses such a pipe has to poll it.
//
// Sends are synchronous: one has ended only once the peer has begun to receive it. Other sends may end while their
// bytes wait in the library, which sends them in later calls only, and an idle rank makes none. All bytes pass through
// buffers of the pipe, so MPI never refers to the caller's memory.
#pragma once

#include <array>
#include <memory>

#include "sirtaki.h"
#include "transport/links/link.h"

namespace sirtaki {

class MpiPipe final : public BytePipe {
 public:
  static constexpr size_t piece_bytes = 256 << 10;  // of the longest message
  static constexpr size_t pieces = 4;  // messages in flight, in each direction

  MpiPipe(const srt_mpi& mpi, int32_t peer) : mpi_(mpi), peer_(peer) {}
  // Calls nothing of MPI, which a forked child must not do. Buffers that MPI still uses are never freed.
  ~MpiPipe() override;
  MpiPipe(const MpiPipe&) = delete;
  MpiPipe& operator=(const MpiPipe&) = delete;

  ptrdiff_t write(std::span<const uint8_t> bytes, bool more) override;
  ptrdiff_t read(std::span<uint8_t> bytes) override;
  Transport transport() const override { return Transport::mpi; }
  bool is_polled() const override { return true; }
  bool progress() override {
    reclaim();
    return !is_broken_;
  }
  void stop_sending() override {
    reclaim();
    is_deaf_ = true;
  }
  void give_up() override { is_broken_ = true; }
  std::string trouble() const override { return trouble_; }
  bool is_delivered() const override { return !sending_ || is_deaf_; }

 private:
  struct Piece {
    std::unique_ptr<uint8_t[]> buffer;
    size_t bytes = 0, consumed = 0;
    alignas(8) std::array<uint8_t, 8> request{};  // an MPI_Request: a pointer or an int
    bool is_in_flight = false;
  };
  // A ring of pieces, of which `count` are in use from `first` on.
  struct Pieces {
    std::array<Piece, pieces> all;
    size_t first = 0, count = 0;
    Piece& at(size_t index) { return all[(first + index) % pieces]; }
    void drop_first() {
      first = (first + 1) % pieces;
      --count;
    }
  };
  struct alignas(16) StatusOfMpi {
    std::array<uint8_t, 64> bytes{};  // an MPI_Status has 20 bytes in MPICH, 24 in Open MPI, 32 in the ABI of MPI 5
  };

  void reclaim();
  bool send_filled();
  void receive_further();
  bool has_ended(Piece& piece);
  bool works(int code, const char* function);  // notes an error
  void fail(std::string_view what);

  const srt_mpi mpi_;
  const int32_t peer_;
  Pieces out_, in_;
  Piece* filling_ = nullptr;  // the last of out_, which is not sent yet
  size_t sending_ = 0;  // pieces of out_ in flight
  bool is_broken_ = false, is_deaf_ = false;  // the other end receives nothing more
  std::string trouble_;
};

}  // namespace sirtaki
