#include "model/stage.h"

#include <optional>
#include <utility>

namespace echelon {

Stage::Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const StageSlice& slice,
             int first_group, const Faults& faults, std::shared_ptr<const OffloadedActivations> offloaded)
    : rank_(&rank),
      parameters_(&parameters),
      first_group_(first_group),
      first_layer_(slice.layers.begin - slice.embedding),
      idle_(static_cast<std::size_t>(slice.idle)),
      offloaded_(std::move(offloaded)) {
  const TensorParallel tensor_parallel(rank, plan.sequence_parallel);
  const auto add = [&](BlockProgram program) {
    blocks_.emplace_back(std::move(program), rank, plan, parameters, tensor_parallel, faults);
  };
  if (slice.embedding) add(embedding_program(plan.model));
  for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer)
    add(layer_program(plan.model, layer));
  if (slice.head) add(slice.vocabulary_is_cut ? final_norm_program(plan.model) : head_program(plan.model));
}

int Stage::group_read_by(std::size_t block) const {
  return blocks_[block].ends_in_loss() ? parameters_->output_group() : group_of(block);
}

void Stage::need_gradients(std::size_t block) const {
  parameters_->need_gradients(group_of(block));
  if (blocks_[block].ends_in_loss()) parameters_->need_output_gradient();
}

// With offloaded activations, a backward pass holds those of two blocks at once: the current one's, and the
// next one's, which arrive meanwhile.
static constexpr std::size_t blocks_here = 2;

void Stage::bring(Saved& saved, std::size_t block) const {
  if (offloaded_ && block >= idle_) offloaded_->bring(saved[block]);
}

void Stage::expect_backward(Saved& saved) const {
  if (!blocks_.empty()) bring(saved, blocks_.size() - 1);
}

Work<Tensor> Stage::forward(const Microbatch& microbatch, Tensor input, Saved& saved, bool turns) const {
  saved.resize(blocks_.size());
  Tensor x = std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    std::optional<ParameterStore::Use> used;  // the head is run in the backward pass
    if (!blocks_[i].ends_in_loss()) used.emplace(*parameters_, group_read_by(i));
    x = co_await blocks_[i].forward(microbatch, std::move(x), saved[i]);
    if (i < idle_)
      saved[i] = {};
    else if (offloaded_ && !(turns && i + blocks_here >= blocks_.size()))
      offloaded_->put_away(saved[i]);
  }
  co_return std::move(x);
}

Work<Tensor> Stage::backward(const Microbatch& microbatch, Tensor dy, Loss loss, Saved& saved, Weights when,
                             GroupDone group_done, std::function<void()> all_asked_for) const {
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    if (i < idle_) {
      dy = Tensor();
      if (when == Weights::now) group_done(group_of(i));
      continue;
    }
    std::optional<ParameterStore::Use> used;
    if (blocks_[i].reads_values_backward()) used.emplace(*parameters_, group_read_by(i));
    const Weights weights = blocks_[i].ends_in_loss() ? Weights::now : when;
    if (weights == Weights::now || blocks_[i].adds_at_once()) need_gradients(i);
    bring(saved, i);
    if (i > first_kept())
      bring(saved, i - 1);
    else if (all_asked_for)
      std::exchange(all_asked_for, nullptr)();
    if (offloaded_) offloaded_->wait_for(saved[i]);
    dy = co_await blocks_[i].backward(microbatch, std::move(dy), saved[i], weights, loss);
    if (weights == Weights::now) group_done(group_of(i));
  }
  co_return std::move(dy);
}

void Stage::backward_weight(Saved& saved, const GroupDone& group_done) const {
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    if (blocks_[i].ends_in_loss()) continue;
    need_gradients(i);
    BlockRunner::backward_weight(saved[i]);
    group_done(group_of(i));
  }
}

Tensor Stage::evaluate(const Microbatch& microbatch, Tensor input, std::int64_t position,
                       const std::vector<BlockCache>& caches) const {
  Tensor x = std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto used = parameters_->use(group_read_by(i));
    x = blocks_[i].evaluate(microbatch, std::move(x), position, caches.empty() ? BlockCache() : caches[i]);
  }
  return x;
}

std::vector<BlockCache> Stage::make_caches(std::int64_t max_positions) const {
  std::vector<BlockCache> caches;
  for (const BlockRunner& block : blocks_) caches.push_back(block.make_cache(max_positions));
  return caches;
}

std::vector<Stage::Mixture> Stage::mixtures() const {
  std::vector<Mixture> list;
  for (std::size_t i = 0; i < blocks_.size(); ++i)
    if (const ExpertParallel* experts = blocks_[i].experts())
      list.push_back({first_layer_ + static_cast<std::int64_t>(i), experts});
  return list;
}

}  // namespace echelon
