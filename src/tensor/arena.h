// Memory of one rank: every byte is accounted by category, and freed blocks are kept and handed out again, so
// that a steady-state step asks the system for nothing. On the host they are parts of one region, or of few,
// and what is free side by side is one piece. On Device::none it is accounted and never there.
//
// On an accelerator the system gives each block by itself, but what comes and goes may be a part of a larger
// block that is free meanwhile, which is whole again when its parts are given back. A block is given back
// while kernels that use it are still queued: whoever takes it next queues behind them on the rank's stream.
// What another stream uses is said to the block, and it is handed out again only when that stream has come so
// far. The host runs ahead of both: two blocks of a size may be kept so, and whoever needs a third waits, on
// the rank's stream, for the oldest of them.
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

// Of passes that run again as graphs the memory is theirs alone: what is handed out while they run comes back
// when they are over, and goes to the next of them, which may be a graph that was captured on it. It counts
// as much as the largest of them held, from then on, whether one runs or not.
enum class MemoryPool { general, passes };

// One allocation. Returns itself to its arena when the last Tensor that views it goes. Without an arena:
// memory that somebody else keeps.
struct Block {
  Arena* arena = nullptr;
  Device device = Device::cpu;
  bool has_memory = false;    // not while it is released
  std::byte* data = nullptr;  // while it has memory; of another device than the cpu not for the host
  std::size_t bytes = 0;      // as asked: what the account counts
  std::size_t capacity = 0;   // as held
  MemoryCategory category = MemoryCategory::other;
  MemoryPool pool = MemoryPool::general;
  std::vector<std::shared_ptr<DeviceEvent>> in_use_until = {};  // of other streams than the arena's
};

// Not thread-safe: a rank's arena is used by that rank's thread alone. Must outlive its blocks.
class Arena {
  // The value of a member while this lives, and not after it.
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
  // `limit_bytes` > 0: an allocation that would bring the live total above it throws RunError (what, how
  // much).
  explicit Arena(Device device = Device::cpu, std::size_t limit_bytes = 0);
  // Of Device::none, as if it were of `imagined`.
  static Arena dry(Device imagined) { return {Device::none, imagined}; }
  // Of a driver's device, with streams of its own there; of the cpu where `driver` is null.
  Arena(DeviceDriver* driver, int device_number, std::size_t limit_bytes = 0);
  // Waits for what is queued.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // 64-byte aligned, contents undefined. RunError when the system has no memory left.
  std::shared_ptr<Block> allocate(std::size_t bytes, MemoryCategory category);
  // One that comes to memory by acquire().
  std::shared_ptr<Block> block_without_memory(std::size_t bytes, MemoryCategory category);

  // What is allocated while it lives is from that pool.
  class PoolUse : Setting<MemoryPool> {
   public:
    PoolUse(Arena& arena, MemoryPool pool) : Setting(arena.pool_, pool) {}
  };
  MemoryPool pool() const { return pool_; }

  // What is allocated while it lives is given back before any larger block is needed again that is free now
  // (where `is_brief`), and on an accelerator may be a part of one. Else nothing there is cut from more than
  // twice what is wanted: what stays would keep a large block, such as that of the logits, from being whole
  // when it is needed.
  class BriefUse : Setting<bool> {
   public:
    explicit BriefUse(Arena& arena, bool is_brief = true) : Setting(arena.is_brief_, is_brief) {}
  };
  // No graph is left: what passes held, and have given back, is everybody's.
  void end_passes();

  // The block gives its memory back while its views live on, and takes some again, contents undefined. What
  // allocate() throws.
  void release(Block& block);
  void acquire(Block& block);

  Device device() const { return device_; }
  // The same, and of Device::none whose memory is imagined: never none.
  Device stands_for() const { return stands_for_; }
  // Of Device::cuda: where the rank's kernels run in order.
  DeviceStream& stream() const { return *stream_; }
  // And what crosses between ranks: a stream for each group of that name, so that what one axis sends does
  // not stand behind another's. Made at its first use.
  DeviceStream& transfers(const std::string& name);
  const Memory& live() const { return live_; }
  // Live bytes by category at the moment when their total was largest since the last reset_peak().
  const Memory& peak() const { return peak_; }
  void reset_peak() { peak_ = live_; }
  // How often the system was asked for memory: constant over steady-state steps.
  std::int64_t system_allocations() const { return system_allocations_; }
  // What the system has given: live blocks and those kept for reuse; on the host the regions, from their
  // first byte to the last that was in use since drop_kept().
  std::size_t held_bytes() const { return held_bytes_; }
  // The host waits for what kernels have been asked to do: nothing on the cpu, where they are done.
  void synchronize() const;
  // Gives the kept blocks back to the system, but for those of passes, and for those before others in a
  // region.
  void drop_kept();

 private:
  struct InUse {
    std::size_t capacity;
    std::byte* data;
    MemoryPool pool;
    std::vector<std::shared_ptr<DeviceEvent>> until;
  };

  // Of what the system has given at once, or of a region, all or a part; that of the next address is beside
  // it where it does not begin one.
  struct Piece {
    std::size_t bytes;
    bool begins = true, is_free = false;
    MemoryPool pool = MemoryPool::general;  // while it is free
  };
  using Pieces = std::map<std::byte*, Piece>;
  using Kept = std::set<std::pair<std::size_t, std::byte*>>;  // what is free, by size
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
  Memory passes_live_, passes_peak_;  // of these live_ has the second
  std::vector<InUse> in_use_;         // given back, and used by other streams
  std::int64_t system_allocations_ = 0;
  std::size_t held_bytes_ = 0;
};

}  // namespace echelon
