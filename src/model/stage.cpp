#include "model/stage.h"

#include <numeric>
#include <utility>

namespace echelon {

Stage::Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const StageSlice& slice,
             int first_group, const Faults& faults)
    : rank_(&rank),
      parameters_(&parameters),
      first_group_(first_group),
      has_embedding_(slice.embedding),
      first_layer_(slice.layers.begin) {
  const ModelSpec& model = plan.model;
  const TensorParallel tensor_parallel(rank, plan.sequence_parallel);
  const auto add = [&](BlockProgram program) {
    blocks_.emplace_back(std::move(program), rank, plan, parameters, tensor_parallel, faults);
  };
  if (slice.embedding) add(embedding_program(model));
  for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer)
    add(layer_program(model, layer));
  if (slice.head) {
    const OpSetting setting{rank, plan, parameters, tensor_parallel, {}, faults};
    const BlockProgram program = head_program(model);
    const BlockOp& norm = *program.find(OpKind::norm);
    head_.emplace(rank, tensor_parallel,
                  Norm(setting.stacked(norm.weights), setting.stacked(norm.biases), model.norm_eps),
                  parameters.output_weight(), first_id_here(embedding_parameters(model).front(), setting));
  }
}

Work<Tensor> Stage::forward(const Microbatch& microbatch, Tensor input, Saved& saved) const {
  saved.blocks.resize(blocks_.size());
  Tensor x = std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto use = parameters_->use(group_of(i));
    x = co_await blocks_[i].forward(microbatch, std::move(x), saved.blocks[i]);
  }
  if (!has_head()) co_return std::move(x);
  saved.out = std::move(x);
  co_return Tensor();
}

Tensor Stage::head_backward(const Microbatch& microbatch, double gradient_scale, Saved& saved,
                            const GroupDone& group_done, Tensor& loss_sum) const {
  const auto use = parameters_->use(parameters_->output_group());
  parameters_->need_output_gradient();
  OutputHead::Result head =
      head_->loss_and_gradient(std::exchange(saved.out, {}), microbatch.targets, gradient_scale);
  loss_sum = head.loss_sum;
  group_done(group_of(blocks_.size()));
  return std::move(head.dx);
}

Work<Stage::Backward> Stage::backward(const Microbatch& microbatch, Tensor dy, double gradient_scale,
                                      Saved& saved, Weights when, GroupDone group_done) const {
  Backward result;
  if (has_head()) dy = head_backward(microbatch, gradient_scale, saved, group_done, result.loss_sum);
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    // The embedding's backward pass reads no values.
    std::optional<ParameterStore::Use> use;
    if (i > 0 || !has_embedding()) use.emplace(*parameters_, group_of(i));
    if (when == Weights::now) parameters_->need_gradients(group_of(i));
    dy = co_await blocks_[i].backward(microbatch, dy, saved.blocks[i], when);
    if (when == Weights::now) group_done(group_of(i));
  }
  result.dx = std::move(dy);
  co_return std::move(result);
}

void Stage::backward_weight(Saved& saved, const GroupDone& group_done) const {
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    parameters_->need_gradients(group_of(i));
    BlockRunner::backward_weight(saved.blocks[i]);
    group_done(group_of(i));
  }
}

Tensor Stage::evaluate(const Microbatch& microbatch, Tensor input) const {
  Tensor x = std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto use = parameters_->use(group_of(i));
    x = blocks_[i].evaluate(microbatch, std::move(x));
  }
  return x;
}

double Stage::loss(const Microbatch& microbatch, const Tensor& input) const {
  const auto use = parameters_->use(parameters_->output_group());
  return head_->loss(input, microbatch.targets);
}

std::vector<Tensor> Stage::make_caches(std::int64_t max_positions) const {
  std::vector<Tensor> caches;
  for (const BlockRunner& block : blocks_)
    caches.push_back(block.cache_width() > 0 ? rank_->activation({max_positions, block.cache_width()})
                                             : Tensor());
  return caches;
}

Tensor Stage::generate(const Microbatch& tokens, Tensor input, std::int64_t position,
                       const std::vector<Tensor>& caches) const {
  Tensor x = std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto use = parameters_->use(group_of(i));
    x = blocks_[i].generate(tokens, std::move(x), position, caches[i]);
  }
  return x;
}

template <class Visit>
void Stage::each_mixture(const Visit& visit) const {
  for (std::size_t i = has_embedding() ? 1 : 0; i < blocks_.size(); ++i)
    if (const ExpertParallel* experts = blocks_[i].experts())
      visit(first_layer_ + static_cast<std::int64_t>(i) - (has_embedding() ? 1 : 0), *experts);
}

void Stage::take_routing_counts(std::vector<RoutingCounts>& counts) const {
  each_mixture([&](std::int64_t layer, const ExpertParallel& experts) {
    counts.push_back(experts.take_counts());
    counts.back().layer = layer;
  });
}

MovedCopies Stage::take_moved_copies() const {
  MovedCopies moved;
  each_mixture([&](std::int64_t, const ExpertParallel& experts) { moved += experts.take_moved(); });
  return moved;
}

void Stage::begin_step() const {
  each_mixture([](std::int64_t, const ExpertParallel& experts) { experts.begin_step(); });
}

void Stage::balance_routers(const std::vector<RoutingCounts>& counts) const {
  for (const RoutingCounts& c : counts)
    each_mixture([&](std::int64_t layer, const ExpertParallel& experts) {
      if (layer == c.layer) experts.balance(c.routed);
    });
}

void Stage::take_router_biases(RouterBiases& biases) const {
  each_mixture([&](std::int64_t layer, const ExpertParallel& experts) {
    if (!experts.bias().empty()) biases[layer] = experts.bias();
  });
}

void Stage::set_router_biases(const RouterBiases& biases) const {
  each_mixture([&](std::int64_t layer, const ExpertParallel& experts) {
    if (const auto found = biases.find(layer); found != biases.end()) experts.set_bias(found->second);
  });
}

void Stage::watch_routing(RoutingWatch* watch) const {
  each_mixture(
      [&](std::int64_t layer, const ExpertParallel& experts) { experts.watch_routing(layer, watch); });
}

Tensor Stage::logits(const Tensor& input) const {
  const auto use = parameters_->use(parameters_->output_group());
  return head_->logits(input, 1);
}

}  // namespace echelon
