// Memory of one rank. Every byte is counted by category, and freed blocks are kept and reused, so that a
// steady-state step requests nothing from the system. On the host, blocks are parts of one region, or of a
// few, and neighbouring free blocks merge. On Device::none memory is counted but never exists.
//
// On an accelerator the system provides each block separately, but a short-lived block may be part of a
// larger free block, which is whole again when its parts are returned. A block may be returned while queued
// kernels still use it: whoever takes it next queues after them on the rank's stream. If another stream uses
// a block, the block is told, and is reused only when that stream has finished with it. The host runs ahead
// of both: two blocks of a size may be held in this way; a request for a third waits, on the rank's stream,
// for the oldest of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "spec/device.h"
#include "spec/memory.h"

namespace echelon {

class Arena;
class DeviceDriver;
class DeviceEvent;
class DeviceStream;
class HostRegion;

// Memory of passes that are replayed as graphs belongs to them alone: what is allocated while they run is
// reusable only by later such passes, which may be graphs captured on it. It counts, from then on, as the
// most that any of them held, whether one runs or not.
enum class MemoryPool { general, passes };

// One allocation. It returns to its arena when the last Tensor that views it is destroyed. Without an arena:
// memory that somebody else owns.
struct Block {
  Arena* arena = nullptr;
  Device device = Device::cpu;
  bool has_memory = false;    // false while released
  std::byte* data = nullptr;  // valid while it has memory; on other devices than the CPU not for the host
  std::size_t bytes = 0;      // as requested: what is counted
  std::size_t capacity = 0;   // as held
  MemoryCategory category = MemoryCategory::other;
  MemoryPool pool = MemoryPool::general;
  std::vector<std::shared_ptr<DeviceEvent>> in_use_until = {};  // of other streams than the arena's
};

// Not thread-safe: only its rank's thread uses it. Must outlive its blocks.
class Arena {
  // Sets a member during its lifetime.
  template <class T>
  class Setting {
   public:
    Setting(T& member, T value) : member_(member), before_(std::exchange(member, value)) {}
    ~Setting() { member_ = before_; }
    Setting(const Setting&) = delete;
    Setting& operator=(const Setting&) = delete;

   private:
    T& member_;
    const T before_;
  };

 public:
  // `limit_bytes` > 0: an allocation that would raise the live total above it throws RunError (what, how
  // much).
  explicit Arena(Device device = Device::cpu, std::size_t limit_bytes = 0);
  // Of Device::none, standing for `imagined`.
  static Arena dry(Device imagined) { return {Device::none, imagined}; }
  // On a driver's device, with streams of its own there; on the CPU if `driver` is null.
  Arena(DeviceDriver* driver, int device_number, std::size_t limit_bytes = 0);
  // Waits for queued work.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // 64-byte aligned, contents undefined. RunError if the system has no memory left.
  std::shared_ptr<Block> allocate(std::size_t bytes, MemoryCategory category);
  // A block that gets its memory from acquire().
  std::shared_ptr<Block> block_without_memory(std::size_t bytes, MemoryCategory category);

  // Allocations during its lifetime come from this pool.
  class PoolUse : Setting<MemoryPool> {
   public:
    PoolUse(Arena& arena, MemoryPool pool) : Setting(arena.pool_, pool) {}
  };
  MemoryPool pool() const { return pool_; }

  // Promises (if `is_brief`) that allocations during its lifetime are returned before any larger block that
  // is free now is needed again, so that on an accelerator they may be parts of one. Otherwise no block is
  // cut from one of more than twice its size: if it stayed, a large block, such as that of the logits, would
  // not be whole when needed.
  class BriefUse : Setting<bool> {
   public:
    explicit BriefUse(Arena& arena, bool is_brief = true) : Setting(arena.is_brief_, is_brief) {}
  };
  // Called when no graph is left: returns the memory of their passes to general use.
  void end_passes();

  // release() frees the block's memory while views of it live on; acquire() gives it memory again, contents
  // undefined. Throws as allocate() does.
  void release(Block& block);
  void acquire(Block& block);

  Device device() const { return device_; }
  // The same, but for Device::none the imagined device: never none.
  Device stands_for() const { return stands_for_; }
  // Device::cuda: the stream on which the rank's kernels run in order.
  DeviceStream& stream() const { return *stream_; }
  // Device::cuda: a stream for transfers between ranks, one for each group name, so that one axis does not
  // queue behind another. Created at its first use.
  DeviceStream& transfers(const std::string& name);
  const Memory& live() const { return live_; }
  // Live bytes by category at the moment of their largest total since the last reset_peak().
  const Memory& peak() const { return peak_; }
  void reset_peak() { peak_ = live_; }
  // How often memory was requested from the system: constant over steady-state steps.
  std::int64_t system_allocations() const { return system_allocations_; }
  // Bytes from the system: live blocks and those kept for reuse; on the host, the regions from their first
  // byte to the last that was in use since drop_kept().
  std::size_t held_bytes() const { return held_bytes_; }
  // Makes the host wait for queued kernels; does nothing on the CPU.
  void synchronize() const;
  // Returns kept blocks to the system, except those of passes, and those before others in a region.
  void drop_kept();

 private:
  struct InUse {
    std::size_t capacity;
    std::byte* data;
    MemoryPool pool;
    std::vector<std::shared_ptr<DeviceEvent>> until;
  };

  // All or part of a block from the system, or of a region. The piece at the next address is its neighbour
  // unless that `begins` a block.
  struct Piece {
    std::size_t bytes;
    bool begins = true, is_free = false;
    MemoryPool pool = MemoryPool::general;  // while it is free
  };
  using Pieces = std::map<std::byte*, Piece>;
  using Kept = std::set<std::pair<std::size_t, std::byte*>>;  // free pieces, by size
  Kept& kept(MemoryPool pool) { return pool == MemoryPool::general ? free_ : of_passes_; }
  void account(const Block& block);
  void take_bytes(Block& block);
  void take_bytes(Block& block, std::size_t wanted);
  bool take_kept(Block& block, std::size_t wanted);
  Kept::iterator first_free(std::size_t bytes);
  void take(Kept& all, Kept::iterator found, std::size_t bytes);
  void keep(std::byte* data, MemoryPool pool);
  std::byte* ask_system(std::size_t bytes);
  std::byte* grow_region(std::size_t bytes);
  void shrink_regions();
  void take_back_unused();

  Arena(Device device, Device stands_for);

  Device device_, stands_for_;
  std::size_t limit_bytes_;
  Memory live_, peak_;
  std::unique_ptr<DeviceStream> stream_;
  std::map<std::string, std::unique_ptr<DeviceStream>> transfers_;
  std::vector<std::unique_ptr<HostRegion>> regions_;  // on the host
  Pieces pieces_;
  Kept free_, of_passes_;
  MemoryPool pool_ = MemoryPool::general;
  bool is_brief_ = false;
  Memory passes_live_, passes_peak_;  // live_ includes the second
  std::vector<InUse> in_use_;         // returned, but still in use by other streams
  std::int64_t system_allocations_ = 0;
  std::size_t held_bytes_ = 0;
};

}  // namespace echelon
