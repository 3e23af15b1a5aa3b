#include "tensor/arena.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "tensor/device_stream.h"
#include "tensor/host_region.h"

namespace echelon {
namespace {

constexpr std::size_t alignment = 64;  // a cache line, and the widest vector
constexpr std::ptrdiff_t most_in_use =
    2;  // blocks of a size that other streams still use: enough that one hides another
// Smaller requests are not cut from larger blocks: for little gain, these could not become whole again.
constexpr std::size_t smallest_cut = std::size_t{256} << 10;

bool comes_and_goes(MemoryCategory c) {
  return c != MemoryCategory::parameters && c != MemoryCategory::gradients && c != MemoryCategory::optimizer;
}

std::size_t rounded(std::size_t bytes) {
  return bytes == 0 ? alignment : (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

Arena::Arena(Device device, Device stands_for) : device_(device), stands_for_(stands_for), limit_bytes_(0) {}

Arena::Arena(Device device, std::size_t limit_bytes)
    : device_(device), stands_for_(device == Device::none ? Device::cpu : device), limit_bytes_(limit_bytes) {
  check(device != Device::cuda, "memory of an accelerator comes from its driver");
}

Arena::Arena(DeviceDriver* driver, int device_number, std::size_t limit_bytes)
    : device_(driver == nullptr ? Device::cpu : Device::cuda),
      stands_for_(device_),
      limit_bytes_(limit_bytes) {
  if (driver == nullptr) return;
  stream_ = std::make_unique<DeviceStream>(*driver, device_number);
}

DeviceStream& Arena::transfers(const std::string& name) {
  std::unique_ptr<DeviceStream>& stream = transfers_[name];
  if (!stream) stream = std::make_unique<DeviceStream>(stream_->driver(), stream_->device());
  return *stream;
}

void Arena::end_passes() {
  for (const MemoryCategory c : all_memory_categories) live_[c] -= passes_peak_[c] - passes_live_[c];
  passes_peak_ = passes_live_;
  for (const auto& [bytes, data] : std::exchange(of_passes_, {})) keep(data, MemoryPool::general);
  for (InUse& block : in_use_) block.pool = MemoryPool::general;
}

Arena::~Arena() {
  end_passes();
  try {
    drop_kept();
  } catch (const RunError&) {  // the device is lost; whoever used it has reported that
    for (const auto& [data, piece] : pieces_)
      if (piece.begins) stream_->driver().free(stream_->device(), data);
  }
}

void Arena::synchronize() const {
  if (stream_) stream_->synchronize();
}

void Arena::drop_kept() {
  if (!stream_) return shrink_regions();
  stream_->synchronize();  // queued work may still use them
  for (const InUse& block : in_use_)
    for (const auto& event : block.until) event->synchronize();
  take_back_unused();
  for (auto kept = free_.begin(); kept != free_.end();) {
    const auto [bytes, data] = *kept;
    const auto piece = pieces_.find(data), next = std::next(piece);
    const bool is_whole = piece->second.begins && (next == pieces_.end() || next->second.begins);
    kept = is_whole ? free_.erase(kept) : std::next(kept);
    if (!is_whole) continue;
    pieces_.erase(piece);
    stream_->driver().free(stream_->device(), data);
    held_bytes_ -= bytes;
  }
}

// Gives back what is free at the end of each region.
void Arena::shrink_regions() {
  for (const auto& region : regions_) {
    if (region->end() == region->begin()) continue;
    const auto last = std::prev(pieces_.lower_bound(region->end()));
    const auto [data, piece] = *last;
    if (!piece.is_free) continue;
    free_.erase({piece.bytes, data});
    pieces_.erase(last);
    region->shrink(piece.bytes);
    held_bytes_ -= piece.bytes;
  }
  std::erase_if(regions_, [](const auto& region) { return region->end() == region->begin(); });
}

// A region grows by what is not free at its end. null: the system is out of memory.
std::byte* Arena::grow_region(std::size_t bytes) {
  const auto grow = [&](HostRegion& region) -> std::byte* {
    const bool is_empty = region.end() == region.begin();
    const auto last = is_empty ? pieces_.end() : std::prev(pieces_.lower_bound(region.end()));
    const std::size_t there = !is_empty && last->second.is_free ? last->second.bytes : 0;
    std::byte* const data = region.end() - there;
    if (!region.grow(bytes - there)) return nullptr;
    if (there > 0) free_.erase({there, data});
    pieces_.insert_or_assign(data, Piece{bytes, there > 0 ? last->second.begins : is_empty});
    held_bytes_ += bytes - there;
    return data;
  };
  for (auto region = regions_.rbegin(); region != regions_.rend(); ++region)
    if (std::byte* const data = grow(**region)) return data;
  std::unique_ptr<HostRegion> region = HostRegion::reserve(bytes, held_bytes_);
  if (!region) return nullptr;
  regions_.push_back(std::move(region));
  return grow(*regions_.back());
}

std::byte* Arena::ask_system(std::size_t bytes) {
  if (!stream_) return grow_region(bytes);
  std::byte* const data = stream_->driver().allocate(stream_->device(), bytes);
  if (data == nullptr) return nullptr;
  pieces_.emplace(data, Piece{bytes});
  held_bytes_ += bytes;
  return data;
}

// Block by block: a lost device throws when it is asked, and then each block is still in one of the lists.
void Arena::take_back_unused() {
  for (auto block = in_use_.begin(); block != in_use_.end();) {
    const bool is_free = std::all_of(block->until.begin(), block->until.end(),
                                     [](const auto& event) { return event->has_happened(); });
    if (is_free) keep(block->data, block->pool);
    block = is_free ? in_use_.erase(block) : std::next(block);
  }
}

std::shared_ptr<Block> Arena::block_without_memory(std::size_t bytes, MemoryCategory category) {
  auto block = std::make_unique<Block>();
  block->bytes = bytes;
  block->category = category;
  block->arena = this;
  block->device = device_;
  block->pool = pool_;
  return {block.release(), [](Block* b) {
            if (b->has_memory) b->arena->release(*b);
            delete b;
          }};
}

std::shared_ptr<Block> Arena::allocate(std::size_t bytes, MemoryCategory category) {
  std::shared_ptr<Block> block = block_without_memory(bytes, category);
  acquire(*block);
  return block;
}

void Arena::acquire(Block& block) {
  check(!block.has_memory, "a block takes memory while it has some");
  const auto bytes = static_cast<std::int64_t>(block.bytes);
  // Memory of passes counts only as far as it exceeds the peak of earlier passes, which stays reserved.
  const std::int64_t more =
      block.pool == MemoryPool::general
          ? bytes
          : std::max<std::int64_t>(passes_live_.total() + bytes - passes_peak_.total(), 0);
  if (limit_bytes_ > 0 && more > 0 && static_cast<std::size_t>(live_.total() + more) > limit_bytes_)
    fail_for_good("memory limit of {} a rank: {} of {} more on top of {} do not fit",
                  format_bytes(static_cast<double>(limit_bytes_)),
                  format_bytes(static_cast<double>(block.bytes)), memory_category_name(block.category),
                  format_bytes(static_cast<double>(live_.total())));
  if (device_ != Device::none) take_bytes(block);
  block.has_memory = true;
  account(block);
  if (live_.total() > peak_.total()) peak_ = live_;
}

void Arena::account(const Block& block) {
  const auto bytes = static_cast<std::int64_t>(block.bytes);
  if (block.pool == MemoryPool::general) {
    live_[block.category] += bytes;
    return;
  }
  passes_live_[block.category] += bytes;
  if (passes_live_.total() <= passes_peak_.total()) return;
  for (const MemoryCategory c : all_memory_categories) live_[c] += passes_live_[c] - passes_peak_[c];
  passes_peak_ = passes_live_;
}

// On the host any free piece may be cut, since all are contiguous. On an accelerator a kept block may be up
// to a quarter larger than requested: microbatches of slightly different sizes then share blocks, and little
// is wasted. From larger blocks only temporary memory is cut.
bool Arena::take_kept(Block& block, std::size_t wanted) {
  const std::size_t most = stream_ ? wanted + wanted / 4 : wanted;
  Kept& all = kept(block.pool);
  const auto found = stream_ ? all.lower_bound({wanted, nullptr}) : first_free(wanted);
  if (found != all.end()) {
    const bool is_cut = found->first > most;
    const bool may_be_cut = !stream_ || (comes_and_goes(block.category) && wanted >= smallest_cut &&
                                         (is_brief_ || found->first <= 2 * wanted));
    if (!is_cut || may_be_cut) {
      block.data = found->second;
      block.capacity = is_cut ? wanted : found->first;
      take(all, found, block.capacity);
      return true;
    }
  }
  const auto fits = [&](const InUse& used) {
    return used.pool == block.pool && wanted <= used.capacity && used.capacity <= most;
  };
  if (std::count_if(in_use_.begin(), in_use_.end(), fits) < most_in_use) return false;
  const auto oldest = std::find_if(in_use_.begin(), in_use_.end(), fits);
  for (const auto& event : oldest->until) stream_->wait_for(*event);
  block.data = oldest->data;
  block.capacity = oldest->capacity;
  in_use_.erase(oldest);
  return true;
}

// On the host: the one with the lowest address. Then long-lived memory is contiguous, and so is the free
// memory after it, so that a step finds the room that the step before it had.
Arena::Kept::iterator Arena::first_free(std::size_t bytes) {
  // Of those large enough; pieces in use, of which a model of many layers has thousands, are not gone
  // through.
  auto first = free_.lower_bound({bytes, nullptr});
  for (auto other = first; other != free_.end(); ++other)
    if (other->second < first->second) first = other;
  return first;
}

// Takes the first `bytes` of a free piece; the rest stays free.
void Arena::take(Kept& all, Kept::iterator found, std::size_t bytes) {
  const auto [size, data] = *found;
  all.erase(found);
  Piece& piece = pieces_.at(data);
  piece.is_free = false;
  if (bytes == size) return;
  piece.bytes = bytes;
  pieces_.emplace(data + bytes, Piece{size - bytes, false, true, piece.pool});
  all.emplace(size - bytes, data + bytes);
}

// Frees a piece, and merges it with free neighbours.
void Arena::keep(std::byte* data, MemoryPool pool) {
  auto piece = pieces_.find(data);
  if (!stream_) forbid(data, piece->second.bytes);
  piece->second.is_free = true;
  piece->second.pool = pool;
  Kept& all = kept(pool);
  const auto joins = [&](Pieces::iterator first, Pieces::iterator second) {
    return !second->second.begins && first->second.is_free && second->second.is_free &&
           first->second.pool == second->second.pool;
  };
  if (const auto next = std::next(piece); next != pieces_.end() && joins(piece, next)) {
    all.erase({next->second.bytes, next->first});
    piece->second.bytes += next->second.bytes;
    pieces_.erase(next);
  }
  if (piece != pieces_.begin())
    if (const auto before = std::prev(piece); joins(before, piece)) {
      all.erase({before->second.bytes, before->first});
      before->second.bytes += piece->second.bytes;
      pieces_.erase(piece);
      piece = before;
    }
  all.emplace(piece->second.bytes, piece->first);
}

void Arena::take_bytes(Block& block) {
  if (!in_use_.empty()) take_back_unused();
  if (stream_) return take_bytes(block, rounded(block.bytes));
  check(block.pool == MemoryPool::general, "passes run again as graphs on an accelerator");
  take_bytes(block, rounded(block.bytes) + guard_bytes());
  permit(block.data, block.capacity - guard_bytes());
  forbid(block.data + block.capacity - guard_bytes(), guard_bytes());
}

void Arena::take_bytes(Block& block, std::size_t wanted) {
  if (take_kept(block, wanted)) return;
  block.data = ask_system(wanted);
  // Kept memory may be what is missing: releases it. This waits, which is not possible during a capture.
  if (block.data == nullptr && !(stream_ && stream_->is_capturing())) {
    drop_kept();
    block.data = ask_system(wanted);
  }
  if (block.data == nullptr && stream_) fail_out_of_memory(stream_->driver(), stream_->device(), wanted);
  if (block.data == nullptr)
    fail("out of memory: the system has no {} left", format_bytes(static_cast<double>(wanted)));
  block.capacity = wanted;
  ++system_allocations_;
}

void Arena::release(Block& block) {
  check(block.has_memory, "a block gives back memory that it has not");
  (block.pool == MemoryPool::general ? live_ : passes_live_)[block.category] -=
      static_cast<std::int64_t>(block.bytes);
  block.has_memory = false;
  if (block.data == nullptr) return;
  std::byte* const data = std::exchange(block.data, nullptr);
  if (block.in_use_until.empty())
    keep(data, block.pool);
  else
    in_use_.push_back({block.capacity, data, block.pool, std::exchange(block.in_use_until, {})});
}

}  // namespace echelon
