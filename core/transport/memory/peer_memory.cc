#include "transport/memory/peer_memory.h"

#include <sys/random.h>
#include <unistd.h>

namespace sirtaki {
namespace {

// Returns a random number; 0 if the system has none, and then nobody reads.
uint64_t random_nonce() {
  uint64_t nonce = 0;
  return ::getrandom(&nonce, sizeof nonce, 0) == sizeof nonce ? nonce : 0;
}

size_t bytes_of(const std::vector<iovec>& parts) {
  size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

}  // namespace

PeerMemory::PeerMemory(const SharedRegion& region, int own_slot, bool is_wanted)
    : region_(region), own_slot_(own_slot), nonce_(is_wanted ? random_nonce() : 0) {
  if (!is_wanted) return;
  RankBlock& block = own();
  block.process.store(static_cast<uint32_t>(::getpid()), std::memory_order_relaxed);
  block.nonce_address.store(reinterpret_cast<uintptr_t>(&nonce_), std::memory_order_relaxed);
  block.nonce.store(nonce_, std::memory_order_release);
  block.reads_peers.store(may_read_peers(), std::memory_order_release);
}

// Tries it with this rank's memory, and with that of the lowest rank, which is linked first.
bool PeerMemory::may_read_peers() const {
  std::vector<iovec> from, to;
  for (int slot : {own_slot_, 0}) {
    const bool is_linked = region_.rank(slot).nonce.load(std::memory_order_acquire) != 0;
    if (is_linked && !read(slot, from, to)) return false;
  }
  return true;
}

bool PeerMemory::read(int slot, std::vector<iovec>& from, std::vector<iovec>& to) const {
  const RankBlock& block = region_.rank(slot);
  const uint64_t nonce = block.nonce.load(std::memory_order_acquire);
  const auto address = static_cast<uintptr_t>(block.nonce_address.load(std::memory_order_relaxed));
  const auto process = static_cast<pid_t>(block.process.load(std::memory_order_relaxed));
  uint64_t found = 0;
  from.push_back({reinterpret_cast<void*>(address), sizeof found});
  to.push_back({&found, sizeof found});
  // The kernel copies the parts in their order, so the nonce is read last.
  const ssize_t bytes = ::process_vm_readv(process, to.data(), to.size(), from.data(), from.size(), 0);
  const bool is_whole = bytes == static_cast<ssize_t>(bytes_of(to));
  from.clear();
  to.clear();
  return is_whole && nonce != 0 && found == nonce;
}

}  // namespace sirtaki
