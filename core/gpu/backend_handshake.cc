#include "gpu/backend_handshake.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "base/text.h"

namespace sirtaki {
namespace {

constexpr int shares_gpus_from = 23003;  // NCCL 2.30.3, the first version that supports several ranks on one GPU

template <size_t capacity>
void put(const std::string& text, char (&out)[capacity]) {
  std::memcpy(out, text.data(), std::min(text.size(), capacity - 1));
}

// Returns a peer's text up to its terminator or the end of the field, made printable.
template <size_t capacity>
std::string get(const char (&text)[capacity]) {
  return printable(std::string_view(text, strnlen(text, capacity)), capacity);
}

std::string version_text(int version) {
  return format("%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && std::strcmp(value, "1") == 0;
}

// Returns a pair of ranks that work on one GPU, in a sentence; "": none. As for NCCL, ranks with different NCCL_HOSTID
// are on different hosts, and so do not share a GPU.
std::string shared_gpu(const std::vector<GpuFacts>& facts, const RankNames& names) {
  std::map<std::string, size_t> user_of;  // by NCCL_HOSTID and UUID, and by host and bus id
  for (size_t member = 0; member < facts.size(); ++member) {
    const GpuFacts& own = facts[member];
    const std::string host_id = get(own.host_id);
    const int32_t host = host_id.empty() ? own.host : -1;
    size_t user = member;
    for (const std::string& gpu : {host_id + std::string(own.uuid.bytes, sizeof own.uuid.bytes),
                                   format("%s %d %s", host_id.c_str(), host, get(own.bus_id).c_str())})
      user = std::min(user, user_of.try_emplace(gpu, member).first->second);
    if (user == member) continue;
    return format(
        "%s and %s work on one GPU (%s), which NCCL allows from version 2.30.3 on, with "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks. torch.cuda.set_device(hvd.local_rank()) gives each its own",
        names[user].c_str(), names[member].c_str(), get(own.bus_id).c_str());
  }
  return {};
}

}  // namespace

bool makes_nccl_block() { return is_set("NCCL_COMM_BLOCKING"); }

CreatedId create_id(const GpuDevice& device) {
  CreatedId created;
  const GpuDevice::Scope scope(&device);
  created.status = scope.status();
  if (created.status.is_ok())
    created.status = device.libraries().check_nccl(device.libraries().nccl().unique_id(&created.id), "ncclGetUniqueId");
  return created;
}

GpuFacts gather_facts(const Gpu* gpu, int32_t host, const CreatedId* created) {
  GpuFacts facts;
  facts.host = host;
  if (!gpu) {
    put("it has joined without having used a GPU", facts.obstacle);
    return facts;
  }
  const GpuLibraries& libraries = gpu->device().libraries();
  put(gpu->device().bus_id(), facts.bus_id);
  facts.uuid = gpu->device().uuid();
  if (const char* host_id = std::getenv("NCCL_HOSTID")) put(host_id, facts.host_id);
  if (!gpu->kernels().status().is_ok()) put(gpu->kernels().status().text(), facts.no_kernels);
  facts.shares_gpus = is_set("NCCL_MULTI_RANK_GPU_ENABLE");
  if (!libraries.has_nccl()) {
    put(libraries.found_nccl().text, facts.obstacle);
    return facts;
  }
  if (created && !created->status.is_ok()) {
    put(created->status.text(), facts.obstacle);
    return facts;
  }
  if (created) facts.id = created->id;
  facts.nccl_version = libraries.found_nccl().version;
  return facts;
}

std::string obstacle_to_nccl(const std::vector<GpuFacts>& facts, const RankNames& names, bool encrypts) {
  if (encrypts)
    for (size_t member = 0; member < facts.size(); ++member)
      if (facts[member].host != facts.front().host)
        return format("the setting encrypt is 1, and NCCL does not encrypt what goes between the hosts of %s and %s",
                      names.front().c_str(), names[member].c_str());
  const int version = facts.front().nccl_version;
  bool may_share = version >= shares_gpus_from;
  for (size_t member = 0; member < facts.size(); ++member) {
    const GpuFacts& other = facts[member];
    may_share &= other.shares_gpus != 0;
    if (other.nccl_version < oldest_nccl)
      return format("%s has no NCCL to use: %s", names[member].c_str(), get(other.obstacle).c_str());
    if (other.nccl_version != version)
      return format("%s has NCCL %s and %s has NCCL %s; all ranks need the same", names.front().c_str(),
                    version_text(version).c_str(), names[member].c_str(), version_text(other.nccl_version).c_str());
  }
  return may_share ? std::string() : shared_gpu(facts, names);
}

std::string obstacle_to_kernels(const std::vector<GpuFacts>& facts, const RankNames& names) {
  for (size_t member = 0; member < facts.size(); ++member)
    if (const std::string obstacle = get(facts[member].no_kernels); !obstacle.empty())
      return names[member] + " cannot use kernels: " + obstacle;
  return {};
}

BackendHandshake::BackendHandshake(const Transfer& whole, const GpuFacts& own)
    : facts_(whole.members.size()), own_(own), transfer_(std::make_shared<Transfer>()) {
  constexpr auto bytes = static_cast<int64_t>(sizeof(GpuFacts));
  transfer_->plan = whole.plan;
  transfer_->is_last_phase = false;
  transfer_->kind = Kind::allgather;
  transfer_->dtype = DType::uint8;
  transfer_->members = whole.members;
  transfer_->own = whole.own;
  const auto* input = reinterpret_cast<const uint8_t*>(&own_);
  transfer_->buffer.add(input, nullptr, bytes);
  for (size_t member = 0; member < facts_.size(); ++member)
    transfer_->incoming.emplace_back().add(member == whole.own ? input : nullptr,
                                           reinterpret_cast<uint8_t*>(&facts_[member]), bytes);
}

}  // namespace sirtaki
