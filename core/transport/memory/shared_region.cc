#include "transport/memory/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "base/system/machine.h"

namespace sirtaki {
namespace {

constexpr int64_t page = 4096;
constexpr int64_t largest_fitting = 1 << 20;
constexpr size_t ring_span = sizeof(RingHeader) + SharedRegion::ring_bytes;

constexpr size_t ranks_offset = sizeof(RegionHeader) + sizeof(AbortRecord);

size_t rings_offset(int slots) { return ranks_offset + static_cast<size_t>(slots) * sizeof(RankBlock); }

size_t chunks_offset(int slots) {
  const size_t end = rings_offset(slots) + 2 * static_cast<size_t>(slots - 1) * ring_span;
  return (end + 4095) / 4096 * 4096;
}

int64_t bytes_with(int64_t chunk_bytes, int slots) {
  return static_cast<int64_t>(chunks_offset(slots)) + slots * SharedRegion::slots_each * chunk_bytes;
}

int64_t chunk_bytes_in(int64_t bytes, int slots) {
  const int64_t chunks = slots * SharedRegion::slots_each;
  return (bytes - static_cast<int64_t>(chunks_offset(slots))) / chunks / page * page;
}

// Returns the smallest chunk: each rank's share of it is at least a cache line.
int64_t least_chunk_bytes(int slots) { return (int64_t{64} * slots + page - 1) / page * page; }

int64_t memory_of_host() { return int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE); }

Status allocate(int fd, int64_t begin, int64_t bytes) {
  const int error = allocate_pages(fd, begin, bytes);
  errno = error;
  return error ? system_call_failed("allocating shared memory") : Status::ok();
}

}  // namespace

int64_t SharedRegion::fitting_chunk_bytes(int64_t cache_bytes, int ranks, int cores) {
  constexpr int64_t least = 128 << 10, unknown = 512 << 10;
  if (cache_bytes <= 0) return unknown;
  const int64_t ranks_a_core = (ranks + cores - 1) / cores;
  return std::clamp(cache_bytes / (chunks_a_cache * ranks_a_core), least, largest_fitting) / page * page;
}

int64_t SharedRegion::initial_chunk_bytes(const Config& config, int slot_count) {
  const int64_t wish = config.integer(Knob::chunk_bytes);
  return wish ? std::max(wish / page * page, least_chunk_bytes(slot_count))
              : fitting_chunk_bytes(second_level_cache_bytes(), slot_count, online_cores());
}

int64_t SharedRegion::bytes_needed(const Config& config, int slot_count) {
  const int64_t initial = initial_chunk_bytes(config, slot_count);
  return bytes_with(config.integer(Knob::autotune) ? std::max(initial, largest_fitting) : initial, slot_count);
}

int64_t SharedRegion::chunk_bytes_for(int64_t wish) const {
  const auto most = static_cast<int64_t>(chunk_bytes_);
  return wish ? std::clamp(wish / page * page, std::min(least_chunk_bytes(slot_count_), most), most) : most;
}

RegionHeader SharedRegion::layout(const Config& config, int slot_count) {
  const int64_t alignment = page_bytes();  // of what is mapped; pages may be larger than those of chunks
  const int64_t bytes = (bytes_needed(config, slot_count) + alignment - 1) / alignment * alignment;
  const bool shares_tensors = config.integer(Knob::shared_tensors) != 0;
  return {bytes, shares_tensors ? memory_of_host() / slot_count / alignment * alignment : 0};
}

Status SharedRegion::create(const RegionHeader& layout, int slot_count, Descriptor& out) {
  // Uses the raw system call: there is no name in /dev/shm that could be left behind, and no limit of a container's
  // /dev/shm.
  Descriptor memory(static_cast<int>(::syscall(SYS_memfd_create, "sirtaki", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!memory.is_open()) return system_call_failed("memfd_create");
  // Too little memory is noticed here, where there still is another way, and not by a SIGBUS during training.
  SIRTAKI_TRY(allocate(memory.get(), 0, layout.bytes));
  // Gives the chunks back, for their ranks to allocate; if that fails, they stay on this rank's memory node.
  const auto chunks = static_cast<int64_t>(chunks_offset(slot_count));
  if (chunks < layout.bytes)
    std::ignore = ::fallocate(memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, chunks, layout.bytes - chunks);
  RegionHeader made = layout;
  // A limit for the size of files (ulimit -f) costs the arena only.
  if (::ftruncate(memory.get(), layout.bytes + slot_count * layout.section_bytes) != 0) made.section_bytes = 0;
  if (::pwrite(memory.get(), &made, sizeof made, 0) != sizeof made) return system_call_failed("writing shared memory");
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return system_call_failed("sealing shared memory");
  out = std::move(memory);
  return Status::ok();
}

// Reads the layout of sealed memory, and checks that all of it is there.
Status SharedRegion::read_layout(int fd, int64_t least, int slot_count, RegionHeader& out) {
  struct stat facts;
  if (::fstat(fd, &facts) != 0) return system_call_failed("looking at the shared memory");
  // A peer that could shrink the memory could end this process with SIGBUS.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK))
    return {SRT_INVALID_ARGUMENT, "the shared memory is not sealed against shrinking: no rank of sirtaki made it"};
  if (::pread(fd, &out, sizeof out, 0) != sizeof out) return system_call_failed("reading the shared memory");
  const bool is_whole = out.bytes >= 0 && out.bytes <= facts.st_size && out.section_bytes >= 0 &&
                        out.section_bytes <= (facts.st_size - out.bytes) / slot_count;
  if (!is_whole || out.bytes < least)
    return {SRT_INVALID_ARGUMENT,
            format("the shared memory has %lld bytes, but %lld are needed: do all ranks have the same chunk_bytes?",
                   static_cast<long long>(is_whole ? out.bytes : facts.st_size), static_cast<long long>(least))};
  return Status::ok();
}

Status SharedRegion::open(const Config& config, int fd, uintptr_t address, int slot_count,
                          std::unique_ptr<SharedRegion>& out) {
  RegionHeader layout{bytes_needed(config, slot_count), 0};
  auto* base = reinterpret_cast<uint8_t*>(address);
  if (!base) {
    // If the setting is 0, the rank that created the memory has chosen the size of a chunk for all.
    const bool is_open = config.integer(Knob::chunk_bytes) == 0;
    SIRTAKI_TRY(read_layout(fd, is_open ? bytes_with(page, slot_count) : layout.bytes, slot_count, layout));
    const auto size = static_cast<size_t>(layout.bytes);
    void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) return system_call_failed("mapping the shared memory");
    base = static_cast<uint8_t*>(mapped);
  }
  out.reset(new SharedRegion(base, address ? 0 : static_cast<size_t>(layout.bytes), slot_count,
                             static_cast<size_t>(chunk_bytes_in(layout.bytes, slot_count)),
                             {layout.bytes, layout.section_bytes}));
  return Status::ok();
}

Status SharedRegion::allocate_chunks(int fd, int slot) const {
  return allocate(fd, chunk(slot, 0) - base_, static_cast<int64_t>(slots_each * chunk_bytes_));
}

SharedRegion::~SharedRegion() {
  if (mapped_) ::munmap(base_, mapped_);
}

AbortRecord& SharedRegion::abort_record() const {
  return *reinterpret_cast<AbortRecord*>(base_ + sizeof(RegionHeader));
}

RankBlock& SharedRegion::rank(int slot) const { return reinterpret_cast<RankBlock*>(base_ + ranks_offset)[slot]; }

size_t SharedRegion::ring_offset(int from, int to) const {
  const int pair = from == 0 ? 2 * (to - 1) : 2 * (from - 1) + 1;
  return rings_offset(slot_count_) + static_cast<size_t>(pair) * ring_span;
}

RingHeader& SharedRegion::ring(int from, int to) const {
  return *reinterpret_cast<RingHeader*>(base_ + ring_offset(from, to));
}

uint8_t* SharedRegion::ring_data(int from, int to) const { return base_ + ring_offset(from, to) + sizeof(RingHeader); }

uint8_t* SharedRegion::chunk(int slot, uint64_t turn) const {
  const size_t index = static_cast<size_t>(slot) * slots_each + turn % slots_each;
  return base_ + chunks_offset(slot_count_) + index * chunk_bytes_;
}

}  // namespace sirtaki
