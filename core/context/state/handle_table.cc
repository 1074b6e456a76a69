#include "context/state/handle_table.h"

#include <algorithm>

namespace sirtaki {
namespace {

// Returns the text with the operation's name in it once. Operations on process sets have no user-given name.
std::string with_name(const Signature& signature, std::string text) {
  const std::string name = "'" + signature.name + "'";
  if (changes_process_sets(signature.kind) || text.find(name) != std::string::npos) return text;
  return name + ": " + text;
}

}  // namespace

void describe(const Signature& signature, uintptr_t data, srt_tensor& out) {
  out.data = data;
  out.dtype = static_cast<int32_t>(signature.dtype);
  out.dimensions = static_cast<int32_t>(signature.shape.size());
  std::copy(signature.shape.begin(), signature.shape.end(), out.shape);
  out.bytes = static_cast<uint64_t>(signature.bytes());
}

uint64_t HandleTable::next_round(const std::string& name) const {
  const auto found = rounds_.find(name);
  return found == rounds_.end() ? 1 : found->second + 1;
}

size_t HandleTable::NameHash::operator()(const NameKey& key) const {
  const size_t scope = static_cast<size_t>(key.process_set) * 31 + static_cast<size_t>(key.kind);
  return std::hash<std::string_view>()(key.name) ^ scope * 0x9e3779b97f4a7c15u;
}

Ticket HandleTable::open(HandleEntry entry) {
  uint32_t index;
  if (free_.empty()) {
    index = static_cast<uint32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    index = free_.back();
    free_.pop_back();
  }
  const Signature& signature = *entry.signature;
  entry.record =
      observer_.submitted({signature.name, kind_name(signature.kind), signature.process_set, signature.bytes()});
  slots_[index].entry = std::make_unique<HandleEntry>(std::move(entry));
  ++unfinished_;
  if (slots_[index].entry->on_complete) ++signals_.hooks;
  // 31 bits of generation keep the handle a positive int64.
  const Ticket handle = static_cast<Ticket>(slots_[index].generation & 0x7fffffff) << 32 | (index + 1);
  memory_.add(handle, slots_[index].entry->memory_use());
  return handle;
}

HandleTable::Slot* HandleTable::slot_of(Ticket handle) {
  const uint64_t index = (handle & 0xffffffff) - 1;
  if (index >= slots_.size()) return nullptr;
  Slot& slot = slots_[index];
  return slot.entry && (slot.generation & 0x7fffffff) == handle >> 32 ? &slot : nullptr;
}

HandleEntry* HandleTable::find(Ticket handle) {
  Slot* slot = slot_of(handle);
  return slot && !slot->entry->is_released ? slot->entry.get() : nullptr;
}

HandleEntry* HandleTable::open_entry(Ticket handle) {
  Slot* slot = slot_of(handle);
  return slot && !slot->entry->is_finished() ? slot->entry.get() : nullptr;
}

void HandleTable::end(Ticket handle, const Status& status) {
  Slot* slot = slot_of(handle);
  if (!slot || slot->entry->is_finished()) return;
  HandleEntry& entry = *slot->entry;
  const bool was_planned = entry.state == HandleState::planned;
  entry.state = HandleState::finished;
  --unfinished_;
  entry.status = status;
  has_missed_peer_ |= status.code() == SRT_PEER_FINISHED;
  observer_.ended(entry.record, was_planned, status.code());
  OperationCounts::Count& count = counts_.of(entry.signature->kind, entry.backend);
  ++count.operations;
  count.failed += !status.is_ok();
  if (!status.is_ok()) entry.error = with_name(*entry.signature, status.text());
  if (!entry.is_attempted) call_hook(entry);
  free_name_and_memory(entry, handle);
  if (waiters_) changed_.notify_all();
  report_if_due(entry, handle);
  if (entry.is_released) discard(handle);
}

void HandleTable::call_hook(HandleEntry& entry) {
  if (entry.on_complete) completions_.push_back({entry.on_complete, entry.user, entry.status, entry.error});
  forget_hook(entry);
}

bool HandleTable::end_attempt(const Ticket* handles, int32_t count) {
  const bool have_ended =
      std::all_of(handles, handles + count, [this](Ticket handle) { return find(handle)->is_finished(); });
  for (int32_t i = 0; i < count; ++i) {
    HandleEntry& entry = *find(handles[i]);
    entry.is_attempted = false;
    if (have_ended) forget_hook(entry);
    else if (entry.is_finished()) call_hook(entry);
  }
  return have_ended;
}

void HandleTable::forget_hook(HandleEntry& entry) {
  if (entry.on_complete) --signals_.hooks;
  entry.on_complete = nullptr;
}

void HandleTable::watch(Ticket handle, Watch until) {
  HandleEntry& entry = *find(handle);
  if (entry.watch == Watch::no) ++watched_;
  entry.watch = until;
  report_if_due(entry, handle);
}

void HandleTable::set_launched(Ticket handle, const GpuEventPtr& event) {
  HandleEntry* entry = open_entry(handle);
  if (!entry) return;
  entry->launched = event;
  report_if_due(*entry, handle);
}

void HandleTable::report_if_due(HandleEntry& entry, Ticket handle) {
  if (entry.watch == Watch::no) return;
  if (!entry.is_finished() && (entry.watch == Watch::until_finished || !entry.launched)) return;
  entry.watch = Watch::no;
  --watched_;
  reports_.push_back(handle);
  if (collectors_) reported_.notify_one();
}

int32_t HandleTable::take_reports(Ticket* out, int32_t capacity) {
  const auto count = std::min<ptrdiff_t>(std::ssize(reports_), capacity);
  std::copy_n(reports_.begin(), count, out);
  reports_.erase(reports_.begin(), reports_.begin() + count);
  return static_cast<int32_t>(count);
}

void HandleTable::free_early(Ticket handle) {
  if (HandleEntry* entry = find(handle)) free_name_and_memory(*entry, handle);
}

void HandleTable::free_name_and_memory(HandleEntry& entry, Ticket handle) {
  if (entry.is_freed) return;
  entry.is_freed = true;
  memory_.remove(handle, entry.memory_use());
  pass_name_on(entry, handle);
}

void HandleTable::release(Ticket handle) {
  HandleEntry* entry = find(handle);
  if (!entry) return;
  entry->is_released = true;
  if (entry->gpu_output) entry->gpu_output->release();
  if (entry->is_finished()) discard(handle);
}

void HandleTable::discard(Ticket handle) {
  Slot* slot = slot_of(handle);
  slot->entry.reset();
  ++slot->generation;
  if ((slot->generation & 0x7fffffff) == 0) ++slot->generation;
  free_.push_back(static_cast<uint32_t>((handle & 0xffffffff) - 1));
}

std::vector<Ticket> HandleTable::unfinished() const {
  std::vector<Ticket> open;
  for (size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].entry && !slots_[i].entry->is_finished())
      open.push_back(static_cast<Ticket>(slots_[i].generation & 0x7fffffff) << 32 | (i + 1));
  return open;
}

bool HandleTable::is_name_taken(const Signature& signature) const { return names_.contains(key_of(signature)); }

void HandleTable::take_name(Ticket handle) {
  HandleEntry& entry = *slot_of(handle)->entry;
  const auto [holder, is_free] = names_.try_emplace(key_of(*entry.signature), Holder{handle, {}});
  if (is_free) entry.state = HandleState::queued;
  else holder->second.behind.push_back(handle);
}

std::vector<Ticket> HandleTable::take_turns() {
  signals_.has_turns.store(false, std::memory_order_relaxed);
  return std::move(turns_);
}

void HandleTable::pass_name_on(const HandleEntry& entry, Ticket handle) {
  const auto found = names_.find(key_of(*entry.signature));
  if (found == names_.end() || found->second.handle != handle) return;  // it was still waiting for the name
  std::vector<Ticket> behind = std::move(found->second.behind);
  names_.erase(found);  // the key points into this entry, so the next holder inserts its own
  while (!behind.empty()) {
    const Ticket next = behind.front();
    behind.erase(behind.begin());
    if (!open_entry(next)) continue;
    HandleEntry& successor = *slot_of(next)->entry;
    names_.emplace(key_of(*successor.signature), Holder{next, std::move(behind)});
    successor.state = HandleState::queued;
    turns_.push_back(next);
    signals_.has_turns.store(true, std::memory_order_relaxed);
    return;
  }
}

}  // namespace sirtaki
