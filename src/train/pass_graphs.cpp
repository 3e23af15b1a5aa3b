#include "train/pass_graphs.h"

#include <array>
#include <utility>

#include "base/error.h"
#include "tensor/host.h"

namespace echelon {
namespace {

// What the host writes of a microbatch; undefined where a plan has none.
template <class AMicrobatch>
auto tensors_of(AMicrobatch& m) {
  return std::array{&m.tokens,        &m.targets,      &m.positions,
                    &m.next_tokens,   &m.next_targets, &m.sequences.first_positions,
                    &m.window_starts, &m.whole_starts};
}

class PausedTrace {
 public:
  explicit PausedTrace(TraceRecorder* recorder) : recorder_(recorder) {
    if (recorder_ != nullptr) recorder_->pause(true);
  }
  ~PausedTrace() {
    if (recorder_ != nullptr) recorder_->pause(false);
  }
  PausedTrace(const PausedTrace&) = delete;
  PausedTrace& operator=(const PausedTrace&) = delete;

 private:
  TraceRecorder* recorder_;
};

}  // namespace

PassGraphs::PassGraphs(const Rank& rank, const Stage& stage) : rank_(rank), stage_(stage) {
  check(stage.mixtures().empty(), "graphs are of passes that the host reads nothing of");
}

PassGraphs::~PassGraphs() {
  saved_.clear();
  passes_.clear();
  rank_.arena().end_passes();
}

PassGraphs::Passes& PassGraphs::passes_of(const Microbatch& m) {
  Passes& passes = passes_[m.sequences.batch];
  if (!passes.inputs.tokens.defined()) {
    passes.inputs = m;
    for (Tensor* input : tensors_of(passes.inputs))
      if (input->defined())
        *input = input->beside(MemoryCategory::activations, input->dtype(), input->shape());
  }
  const auto from = tensors_of(m);
  const auto to = tensors_of(passes.inputs);
  for (std::size_t i = 0; i < from.size(); ++i)
    if (from[i]->defined()) copy_on_device(*from[i], *to[i]);
  return passes;
}

void PassGraphs::forward(const Microbatch& microbatch, const Loss& loss) {
  check(now_ == nullptr, "a microbatch's backward pass comes right behind its forward pass");
  now_ = &passes_of(microbatch);
  const bool is_known = now_->have_run && now_->gradient_scale == loss.gradient_scale;
  if (!is_known) {
    now_->forward.reset();
    now_->backward.reset();
  }
  const bool can_capture = rank_.arena().device() == Device::cuda;
  way_ = !is_known || !can_capture ? Way::plain : now_->backward ? Way::replay : Way::capture;
  now_->gradient_scale = loss.gradient_scale;
  loss_ = loss;
  run(now_->forward, [this] { stage_.forward(now_->inputs, {}, saved_).finish(); });
}

const std::vector<int>& PassGraphs::backward() {
  run(now_->backward, [this] {
    now_->groups.clear();
    const auto note = [this](int group) { now_->groups.push_back(group); };
    stage_.backward(now_->inputs, {}, loss_, saved_, Weights::now, note).finish();
    saved_.clear();
  });
  now_->have_run = true;
  return std::exchange(now_, nullptr)->groups;
}

void PassGraphs::run(std::unique_ptr<DeviceGraph>& graph, const std::function<void()>& pass) {
  if (way_ != Way::replay) {
    const Arena::PoolUse pool(rank_.arena(), MemoryPool::passes);
    const PausedTrace paused(rank_.recorder());
    if (way_ == Way::plain) return pass();
    graph = std::make_unique<DeviceGraph>(rank_.arena().stream(), pass);
  }
  graph->launch();
  ++(way_ == Way::capture ? counts_.captured : counts_.replayed);
}

}  // namespace echelon
