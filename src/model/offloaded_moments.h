// AdamW's moments outside the tensors' memory (an idea of ZeRO-Offload, Ren et al. 2021,
// https://arxiv.org/abs/2101.06840). On the CPU they lie in a file (scratch_file.h), where kernels use them.
// On an accelerator they lie in pinned host memory: on copy streams, one piece is brought or taken back while
// another one is updated.
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
  // `size` elements, zero. Throws as ScratchFile does; RunError if there is no pinned memory.
  OffloadedMoments(const Rank& rank, const Plan& plan, std::int64_t size);
  ~OffloadedMoments();
  OffloadedMoments(const OffloadedMoments&) = delete;
  OffloadedMoments& operator=(const OffloadedMoments&) = delete;

  // (size), on the host. These wait for copies from the device that are still pending.
  const Tensor& exp_avg() const { return exp_avg_; }
  const Tensor& exp_avg_sq() const { return exp_avg_sq_; }

  // Calls update(range, first, second) for all elements of views of the two moments, in pieces that kernels
  // can access.
  using Update = std::function<void(Range range, const Tensor& first, const Tensor& second)>;
  void update(const Tensor& exp_avg, const Tensor& exp_avg_sq, const Update& update);

  // Accelerator memory for the pieces in progress.
  static std::int64_t window_bytes(DType moments) { return 4 * piece * element_bytes(moments); }

 private:
  static constexpr std::int64_t piece = 1 << 20;  // elements
  // There are two: one is updated while the other is brought or taken back.
  struct Slot {
    Tensor first, second;
    Tensor first_home, second_home;     // where its last elements belong
    std::shared_ptr<DeviceEvent> gone;  // they have been copied back
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
