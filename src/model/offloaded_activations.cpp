#include "model/offloaded_activations.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "model/scratch_file.h"
#include "tensor/host.h"

namespace echelon {
namespace {

constexpr const char *activations_out = "activations, out", *activations_in = "activations, in";
constexpr std::int64_t line = 64;  // bytes: a tensor begins on one of its own

struct HostPiece {
  std::unique_ptr<ScratchFile> file;
  std::unique_ptr<PinnedMemory> pinned;
  std::size_t capacity = 0;
  std::int64_t held = 0;              // bytes of what lies there
  std::shared_ptr<DeviceEvent> read;  // what lay there last has come back

  std::byte* data() const { return pinned ? pinned->data() : file->at(0); }
};

}  // namespace

// Pieces of host memory, one for what a block keeps of a microbatch. They are reused, so that a step requests
// nothing from the system once all microbatches have been in flight.
class HostPieces : public std::enable_shared_from_this<HostPieces> {
 public:
  HostPieces(Arena& arena, std::string directory) : arena_(arena), directory_(std::move(directory)) {}
  ~HostPieces() {
    try {
      drop_kept();
    } catch (const RunError&) {  // the device is lost, and whoever used it has said so
    }
  }
  HostPieces(const HostPieces&) = delete;
  HostPieces& operator=(const HostPieces&) = delete;

  // Goes back when nobody holds it. `held`: of its bytes those that are not there to fill a line.
  std::shared_ptr<HostPiece> take(std::size_t bytes, std::int64_t held) {
    HostPiece piece = kept(bytes);
    piece.held = held;
    moved_.out += held;
    lies_there_ += held;
    moved_.most = std::max(moved_.most, lies_there_);
    return {new HostPiece(std::move(piece)), [pieces = shared_from_this()](HostPiece* p) {
              pieces->lies_there_ -= p->held;
              const std::size_t capacity = p->capacity;
              pieces->in_use_ -= capacity;
              pieces->kept_ += capacity;
              pieces->free_.emplace(capacity, std::move(*p));
              delete p;
            }};
  }
  void count_back(std::int64_t bytes) { moved_.back += bytes; }
  HostActivations take_moved() { return std::exchange(moved_, HostActivations{0, 0, lies_there_}); }
  Arena& arena() const { return arena_; }

 private:
  // A kept piece may be up to a quarter larger than asked, as an accelerator's blocks may.
  HostPiece kept(std::size_t bytes) {
    const auto found = free_.lower_bound(bytes);
    const bool is_kept = found != free_.end() && found->first <= bytes + bytes / 4;
    const std::size_t capacity = is_kept ? found->first : bytes;
    in_use_ += capacity;
    most_in_use_ = std::max(most_in_use_, in_use_);
    if (is_kept) {
      kept_ -= capacity;
      return std::move(free_.extract(found).mapped());
    }
    // Where sizes differ from step to step, as of experts, those of other steps are not kept for ever.
    if (in_use_ + kept_ > most_in_use_ + most_in_use_ / 4) drop_kept();
    try {
      return made(bytes);
    } catch (const std::runtime_error&) {  // there is no room, or only in what is kept
      if (free_.empty()) throw;
    }
    drop_kept();
    return made(bytes);
  }
  HostPiece made(std::size_t bytes) {
    HostPiece piece;
    piece.capacity = bytes;
    if (arena_.device() == Device::cuda)
      piece.pinned = std::make_unique<PinnedMemory>(arena_.stream().driver(), std::max<std::size_t>(bytes, 1),
                                                    "activations");
    else
      piece.file = std::make_unique<ScratchFile>(directory_, bytes, arena_.device(), "activations");
    return piece;
  }
  void drop_kept() {
    if (!free_.empty() && arena_.device() == Device::cuda)
      for (const char* stream : {activations_out, activations_in}) arena_.transfers(stream).synchronize();
    free_.clear();
    kept_ = 0;
  }

  Arena& arena_;
  std::string directory_;
  std::multimap<std::size_t, HostPiece> free_;
  std::size_t in_use_ = 0, most_in_use_ = 0, kept_ = 0;  // bytes of pieces
  HostActivations moved_;
  std::int64_t lies_there_ = 0;
};

struct PutAway {
  PutAway(std::shared_ptr<HostPieces> pieces_, std::vector<Tensor> allocations_)
      : pieces(std::move(pieces_)), allocations(std::move(allocations_)) {}
  PutAway(const PutAway&) = delete;
  PutAway& operator=(const PutAway&) = delete;
  // Of what nobody waited for: kernels that get its memory next come behind its copy.
  ~PutAway() {
    try {
      wait();
    } catch (const RunError&) {  // the device is lost, and whoever used it has said so
    }
  }
  void wait() {
    if (back) pieces->arena().stream().wait_for(*std::exchange(back, nullptr));
  }

  std::shared_ptr<HostPieces> pieces;
  std::vector<Tensor> allocations;  // without memory; none once it is here
  std::shared_ptr<HostPiece> piece;
  std::shared_ptr<DeviceEvent> gone, back;
};

namespace {

// The allocations that a state's tensors view. Nobody else does: what a layer keeps is its own.
std::vector<Tensor> allocations_of(const BlockState& state) {
  struct Viewed {
    Tensor allocation;
    std::int64_t views = 0;
  };
  std::vector<Viewed> all;
  const auto add = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    Tensor whole = tensor.allocation();
    for (Viewed& one : all)
      if (one.allocation.begins_with(whole)) {
        ++one.views;
        return;
      }
    all.push_back({std::move(whole), 1});
  };
  for (const Tensor& value : state.values) add(value);
  state.routed.each_tensor(add);
  std::vector<Tensor> allocations;
  for (Viewed& one : all) {
    check(one.allocation.num_views() == one.views + 1, "what a layer keeps is its own when it is put away");
    allocations.push_back(std::move(one.allocation));
  }
  return allocations;
}

std::int64_t lines(std::int64_t bytes) { return (bytes + line - 1) / line * line; }

// Each allocation, and where it lies in the piece.
template <class Visit>
void each_place(const std::vector<Tensor>& allocations, const HostPiece& piece, const Visit& visit) {
  std::int64_t at = 0;
  for (const Tensor& allocation : allocations) {
    if (allocation.bytes() > 0) visit(allocation, piece.data() + at);
    at += lines(allocation.bytes());
  }
}

void queue_copy(CopyKind kind, void* to, const void* from, std::int64_t bytes, DeviceStream& stream) {
  stream.driver().copy({.kind = kind, .to = to, .from = from, .row_bytes = static_cast<std::size_t>(bytes)},
                       stream.handle());
}

}  // namespace

OffloadedActivations::OffloadedActivations(const Rank& rank, const Plan& plan)
    : rank_(&rank), pieces_(std::make_shared<HostPieces>(rank.arena(), plan.offload_directory)) {}

void OffloadedActivations::put_away(BlockState& state) const {
  std::vector<Tensor> allocations = allocations_of(state);
  if (allocations.empty()) return;
  std::int64_t bytes = 0, room = 0;
  for (const Tensor& allocation : allocations) {
    bytes += allocation.bytes();
    room += lines(allocation.bytes());
  }
  auto away = std::make_shared<PutAway>(pieces_, std::move(allocations));
  away->piece = pieces_->take(static_cast<std::size_t>(room), bytes);
  Arena& arena = rank_->arena();
  if (arena.device() == Device::cpu)
    each_place(away->allocations, *away->piece, [](const Tensor& from, std::byte* to) {
      copy_bytes_to_host(from, {to, static_cast<std::size_t>(from.bytes())});
    });
  if (arena.device() == Device::cuda) {
    DeviceStream& out = arena.transfers(activations_out);
    out.wait_for(*arena.stream().record());
    if (away->piece->read) out.wait_for(*std::exchange(away->piece->read, nullptr));
    each_place(away->allocations, *away->piece, [&](const Tensor& from, std::byte* to) {
      queue_copy(CopyKind::to_host, to, from.address(), from.bytes(), out);
    });
    away->gone = out.record();
    for (const Tensor& allocation : away->allocations) allocation.in_use_until(away->gone);
  }
  for (const Tensor& allocation : away->allocations) allocation.release_memory();
  state.away = std::move(away);
}

void OffloadedActivations::bring(BlockState& state) const {
  if (!state.away || state.away->allocations.empty()) return;
  PutAway& away = *state.away;
  for (const Tensor& allocation : away.allocations) allocation.acquire_memory();
  Arena& arena = rank_->arena();
  if (arena.device() == Device::cpu)
    each_place(away.allocations, *away.piece, [](const Tensor& to, const std::byte* from) {
      copy_bytes_from_host({from, static_cast<std::size_t>(to.bytes())}, to);
    });
  if (arena.device() == Device::cuda) {
    DeviceStream& in = arena.transfers(activations_in);
    in.wait_for(*arena.stream().record());  // whoever used the memory before
    in.wait_for(*away.gone);
    each_place(away.allocations, *away.piece, [&](const Tensor& to, const std::byte* from) {
      queue_copy(CopyKind::from_host, to.address(), from, to.bytes(), in);
    });
    away.back = in.record();
    away.piece->read = away.back;
  }
  pieces_->count_back(away.piece->held);
  away.allocations.clear();
  away.piece.reset();
}

void OffloadedActivations::wait_for(BlockState& state) const {
  if (!state.away) return;
  state.away->wait();
  state.away.reset();
}

HostActivations OffloadedActivations::take_moved() const { return pieces_->take_moved(); }

}  // namespace echelon
