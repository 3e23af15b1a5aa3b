// The passes of a rank's microbatches as CUDA graphs (docs/devices.md): what the host launches for one
// microbatch is captured once, and replayed with one call for each later microbatch with as many sequences.
//
// Only a pass is captured, of a dense model on one rank: it contains no messages and no sums over ranks, and
// the host reads nothing. Inputs that change between microbatches (tokens, targets, positions, documents) are
// written where the graph reads them. Arguments of launches stay fixed; the only one that can differ is the
// scale of the gradients, through the number of targets of a batch, and a different scale needs different
// graphs. The optimizer's update is outside the graphs, and with it the learning rate, its corrections and
// the seeds of rounding.
//
// The first microbatch of a kind runs without capturing, so that everything is uploaded, chosen and allocated
// by then. The second is captured and launched. Forward and backward are separate graphs, so that each has a
// span in the timeline.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "model/stage.h"
#include "tensor/device_stream.h"

namespace echelon {

struct GraphCounts {
  std::int64_t captured = 0, replayed = 0;  // passes
};

class PassGraphs {
 public:
  // For a rank with a single stage, the whole model; both outlive it.
  PassGraphs(const Rank& rank, const Stage& stage);
  ~PassGraphs();
  PassGraphs(const PassGraphs&) = delete;
  PassGraphs& operator=(const PassGraphs&) = delete;

  // Run forward, then backward, for one microbatch after another. Without CUDA nothing is captured, but the
  // same memory is held. RunError if a capture or launch fails.
  void forward(const Microbatch& microbatch, const Loss& loss);
  // Returns the layer groups whose gradients now contain the microbatch's contribution, in order.
  const std::vector<int>& backward();

  const GraphCounts& counts() const { return counts_; }

 private:
  // For microbatches with equally many sequences.
  struct Passes {
    Microbatch inputs;  // read by the graphs
    double gradient_scale = 0;
    bool have_run = false;
    std::unique_ptr<DeviceGraph> forward, backward;
    std::vector<int> groups;
  };
  Passes& passes_of(const Microbatch& microbatch);
  void run(std::unique_ptr<DeviceGraph>& graph, const std::function<void()>& pass);

  const Rank& rank_;
  const Stage& stage_;
  std::map<std::int64_t, Passes> passes_;  // by sequences
  // The current microbatch.
  enum class Way { plain, capture, replay };
  Way way_ = Way::plain;
  Passes* now_ = nullptr;
  Loss loss_;
  Stage::Saved saved_;
  GraphCounts counts_;
};

}  // namespace echelon
