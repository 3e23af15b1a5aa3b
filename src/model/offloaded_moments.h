// Moments of AdamW that are not where the kernels' tensors are (ZeRO-Offload's idea, Ren et al. 2021,
// https://arxiv.org/abs/2101.06840). On the cpu they lie in a file (scratch_file.h), where kernels use them.
// On an accelerator they lie in the host's page-locked memory: a piece is brought, updated and taken back on
// streams of copies, while the one before it is updated.
#pragma once

#include <array>
#include <functional>
#include <memory>

#include "base/split.h"
#include "comm/rank.h"
#include "model/scratch_file.h"
#include "spec/plan.h"
#include "tensor/device_stream.h"

namespace echelon {

class OffloadedMoments {
 public:
  // Zeros, of so many elements. What ScratchFile throws; RunError where there is no such memory.
  OffloadedMoments(const Rank& rank, const Plan& plan, std::int64_t size);
  ~OffloadedMoments();
  OffloadedMoments(const OffloadedMoments&) = delete;
  OffloadedMoments& operator=(const OffloadedMoments&) = delete;

  // (size), the host's: it waits for what the device has still to bring back where it reads them.
  const Tensor& exp_avg() const { return exp_avg_; }
  const Tensor& exp_avg_sq() const { return exp_avg_sq_; }

  // update(range, first, second) for all elements of views of the two, in pieces, where kernels find them.
  using Update = std::function<void(Range range, const Tensor& first, const Tensor& second)>;
  void update(const Tensor& exp_avg, const Tensor& exp_avg_sq, const Update& update);

  // Of an accelerator's memory, under what is under way there.
  static std::int64_t window_bytes(DType moments) { return 4 * piece * element_bytes(moments); }

 private:
  static constexpr std::int64_t piece = 1 << 20;  // elements
  // Two of them: while one is updated, the other is brought or taken back.
  struct Slot {
    Tensor first, second;
    Tensor first_home, second_home;     // whose elements were here last
    std::shared_ptr<DeviceEvent> gone;  // they have been taken back
  };
  void queue_copy(CopyKind kind, const Tensor& to, const Tensor& from, DeviceStream& stream) const;
  void update_piece(Slot& slot, Range range, const Update& update);

  const Rank& rank_;
  std::unique_ptr<ScratchFile> file_;
  std::unique_ptr<PinnedMemory> pinned_;
  Tensor exp_avg_, exp_avg_sq_;
  std::array<Slot, 2> slots_;
  std::size_t next_ = 0;
};

}  // namespace echelon
