#include "model/offloaded_moments.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace echelon {

static constexpr const char *in_stream = "offload, in", *out_stream = "offload, out";

OffloadedMoments::OffloadedMoments(const Rank& rank, const Plan& plan, std::int64_t size) : rank_(rank) {
  const DType dtype = rank.precision().moments;
  const std::int64_t bytes = size * element_bytes(dtype);
  std::byte* memory = nullptr;
  if (rank.arena().device() == Device::cuda) {
    pinned_ = std::make_unique<PinnedMemory>(rank.arena().stream().driver(),
                                             static_cast<std::size_t>(std::max<std::int64_t>(2 * bytes, 1)),
                                             "optimizer state");
    memory = pinned_->data();
    std::memset(memory, 0, static_cast<std::size_t>(2 * bytes));
    for (Slot& slot : slots_) {
      slot.first = Tensor(rank.arena(), MemoryCategory::other, dtype, {piece});
      slot.second = Tensor(rank.arena(), MemoryCategory::other, dtype, {piece});
    }
  } else {
    file_ = std::make_unique<ScratchFile>(plan.offload_directory, static_cast<std::size_t>(2 * bytes),
                                          rank.arena().device(), "optimizer state");
    memory = file_->at(0);
  }
  exp_avg_ = Tensor::view_of(memory, dtype, {size});
  exp_avg_sq_ = Tensor::view_of(memory == nullptr ? nullptr : memory + bytes, dtype, {size});
}

OffloadedMoments::~OffloadedMoments() {
  if (!pinned_ || next_ == 0) return;
  try {
    for (const char* stream : {in_stream, out_stream}) rank_.arena().transfers(stream).synchronize();
  } catch (const RunError&) {  // the device is lost, and whoever used it has said so
  }
}

void OffloadedMoments::update(const Tensor& exp_avg, const Tensor& exp_avg_sq, const Update& update) {
  if (!pinned_) return update({0, exp_avg.numel()}, exp_avg, exp_avg_sq);
  for (std::int64_t begin = 0; begin < exp_avg.numel(); begin += piece) {
    const Range range{begin, std::min(begin + piece, exp_avg.numel())};
    Slot& slot = slots_[next_++ % slots_.size()];
    // Its memory is free when what it held last is at home; and what comes now must be at home itself.
    DeviceStream& in = rank_.arena().transfers(in_stream);
    const Tensor first_home = exp_avg.flat_range(range.begin, range.end);
    for (const Slot& other : slots_)
      if (other.gone && (&other == &slot || other.first_home.begins_with(first_home)))
        in.wait_for(*other.gone);
    slot.first_home = first_home;
    slot.second_home = exp_avg_sq.flat_range(range.begin, range.end);
    update_piece(slot, range, update);
  }
}

void OffloadedMoments::update_piece(Slot& slot, Range range, const Update& update) {
  DeviceStream &in = rank_.arena().transfers(in_stream), &out = rank_.arena().transfers(out_stream);
  const DeviceStream& kernels = rank_.arena().stream();
  const Tensor first = slot.first.flat_range(0, range.size()),
               second = slot.second.flat_range(0, range.size());
  queue_copy(CopyKind::from_host, first, slot.first_home, in);
  queue_copy(CopyKind::from_host, second, slot.second_home, in);
  kernels.wait_for(*in.record());
  update(range, first, second);
  out.wait_for(*kernels.record());
  queue_copy(CopyKind::to_host, slot.first_home, first, out);
  queue_copy(CopyKind::to_host, slot.second_home, second, out);
  slot.gone = out.record();
  slot.first_home.in_use_until(slot.gone);
  slot.second_home.in_use_until(slot.gone);
}

void OffloadedMoments::queue_copy(CopyKind kind, const Tensor& to, const Tensor& from,
                                  DeviceStream& stream) const {
  stream.driver().copy({.kind = kind,
                        .to = to.address(),
                        .from = from.address(),
                        .row_bytes = static_cast<std::size_t>(from.bytes())},
                       stream.handle());
}

}  // namespace echelon
