// The passes of a rank's microbatches as CUDA graphs (docs/devices.md): what the host told the device for one
// microbatch, captured once, is queued by one call for each later one of as many sequences.
//
// Captured is the pass alone, of a dense model on one rank: no message and no sum of other ranks is in it,
// and the host reads nothing. What differs from one microbatch to the next is written where the graph reads
// it, tokens, targets, positions and documents; what is an argument of a launch stays what it was, and that
// is of all of them the scale of the gradients alone, by the number of targets of a batch: another one asks
// for other graphs. The optimizer's update is outside, and with it the learning rate, its corrections and the
// seeds of rounding.
//
// The first microbatch of a kind runs as it does without: what is uploaded, chosen and allocated once is
// there by then. The second is captured, and launched. Forward and backward are a graph each, so that both
// have their place in the timeline.
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
  // Of a rank with one stage, the model; both outlive it.
  PassGraphs(const Rank& rank, const Stage& stage);
  ~PassGraphs();
  PassGraphs(const PassGraphs&) = delete;
  PassGraphs& operator=(const PassGraphs&) = delete;

  // Forward, then backward, of one microbatch after another. On another device than CUDA's nothing is
  // captured, and the same memory held. RunError where a capture or a launch fails.
  void forward(const Microbatch& microbatch, const Loss& loss);
  // The layer groups whose gradients have got the microbatch's part, in order.
  const std::vector<int>& backward();

  const GraphCounts& counts() const { return counts_; }

 private:
  // Of microbatches of as many sequences.
  struct Passes {
    Microbatch inputs;  // where graphs read it
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
  // Of the microbatch that is under way.
  enum class Way { plain, capture, replay };
  Way way_ = Way::plain;
  Passes* now_ = nullptr;
  Loss loss_;
  Stage::Saved saved_;
  GraphCounts counts_;
};

}  // namespace echelon
