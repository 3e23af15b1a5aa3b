#include "model/stage.h"

#include <numeric>
#include <utility>
#include <vector>

#include "tensor/host.h"

namespace echelon {

Stage::Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const StageSlice& slice,
             int first_group, const Faults& faults)
    : rank_(&rank),
      parameters_(&parameters),
      tensor_parallel_(rank, plan.sequence_parallel),
      first_group_(first_group),
      first_layer_(slice.layers.begin) {
  const ModelSpec& model = plan.model;
  const bool gpt2 = model.family == Family::gpt2;
  const int tp = rank.size(Axis::tp), index = rank.coordinate(Axis::tp);
  const ParamSpec table = embedding_parameters(model).front();
  const std::int64_t first_id =
      local_ranges(table, tp, index)[0].begin + (index > 0 ? faults.vocabulary_shift : 0);
  if (slice.embedding) {
    embedding_.emplace(rank, tensor_parallel_, parameters.weight(table.name), first_id);
    if (gpt2) positions_ = parameters.weight("transformer.wpe.weight");
  }
  for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer) {
    blocks_.emplace_back(rank, plan, parameters, layer, tensor_parallel_);
    if (faults.router_bias != 0 && model.has_experts(layer)) {
      std::vector<double> bias(static_cast<std::size_t>(model.num_experts));
      bias.front() = faults.router_bias;
      blocks_.back().experts()->set_bias(bias);
    }
  }
  if (slice.head) {
    const Norm norm = gpt2 ? Norm(parameters.weight("transformer.ln_f.weight"),
                                  parameters.weight("transformer.ln_f.bias"), model.norm_eps)
                           : Norm(parameters.weight("model.norm.weight"), {}, model.norm_eps);
    head_.emplace(rank, tensor_parallel_, norm, parameters.output_weight(), first_id);
  }
}

// The ids of the rows of the residual stream that are here.
Tensor Stage::ids_here(const Tensor& ids) const {
  const Range here = tensor_parallel_.rows_here(ids.numel());
  return ids.flat_range(here.begin, here.end);
}

Tensor Stage::embed(const Tensor& tokens, const Tensor& positions) const {
  const auto use = parameters_->use(first_group_);
  const Tensor x = embedding_->forward(tokens);
  if (positions_.defined()) {
    const Tensor added = rank_->activation({x.rows(), x.cols()});
    rank_->kernels().embedding(ids_here(positions), positions_.value, 0, added);
    rank_->kernels().add(added, x);
  }
  return x;
}

void Stage::embed_backward(const Microbatch& microbatch, const Tensor& dx) const {
  parameters_->need_gradients(first_group_);
  if (positions_.defined())
    rank_->kernels().embedding_backward(ids_here(microbatch.positions), dx, 0, positions_.gradient);
  embedding_->backward(microbatch.tokens, dx);
}

Work<Tensor> Stage::forward(const Microbatch& microbatch, Tensor input, Saved& saved) const {
  saved.blocks.resize(blocks_.size());
  Tensor x = has_embedding() ? embed(microbatch.tokens, microbatch.positions) : std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto use = parameters_->use(block_group(i));
    x = co_await blocks_[i].forward(microbatch, x, saved.blocks[i]);
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
  group_done(block_group(blocks_.size()));
  return std::move(head.dx);
}

Work<Stage::Backward> Stage::backward(const Microbatch& microbatch, Tensor dy, double gradient_scale,
                                      Saved& saved, GroupDone group_done) const {
  Backward result;
  if (has_head()) dy = head_backward(microbatch, gradient_scale, saved, group_done, result.loss_sum);
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    const auto use = parameters_->use(block_group(i));
    parameters_->need_gradients(block_group(i));
    dy = co_await blocks_[i].backward(microbatch, dy, saved.blocks[i]);
    group_done(block_group(i));
  }
  if (has_embedding()) {
    embed_backward(microbatch, std::exchange(dy, {}));
    group_done(first_group_);
  }
  result.dx = std::move(dy);
  co_return std::move(result);
}

Work<Stage::Backward> Stage::backward_input(const Microbatch& microbatch, Tensor dy, double gradient_scale,
                                            Saved& saved, GroupDone group_done) const {
  Backward result;
  if (has_head()) dy = head_backward(microbatch, gradient_scale, saved, group_done, result.loss_sum);
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    const auto use = parameters_->use(block_group(i));
    dy = co_await blocks_[i].backward_input(microbatch, dy, saved.blocks[i]);
  }
  if (has_embedding())
    saved.d_embedding = std::move(dy);
  else
    result.dx = std::move(dy);
  co_return std::move(result);
}

void Stage::backward_weight(const Microbatch& microbatch, Saved& saved, const GroupDone& group_done) const {
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    parameters_->need_gradients(block_group(i));
    TransformerBlock::backward_weight(saved.blocks[i]);
    group_done(block_group(i));
  }
  if (has_embedding()) {
    embed_backward(microbatch, std::exchange(saved.d_embedding, {}));
    group_done(first_group_);
  }
}

Tensor Stage::evaluate(const Microbatch& microbatch, Tensor input) const {
  Tensor x = has_embedding() ? embed(microbatch.tokens, microbatch.positions) : std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto use = parameters_->use(block_group(i));
    TransformerBlock::Saved dropped;
    x = blocks_[i].forward(microbatch, x, dropped).finish();
  }
  return x;
}

double Stage::loss(const Microbatch& microbatch, const Tensor& input) const {
  const auto use = parameters_->use(parameters_->output_group());
  return head_->loss(input, microbatch.targets);
}

std::vector<Tensor> Stage::make_caches(std::int64_t max_positions) const {
  std::vector<Tensor> caches;
  for (const TransformerBlock& block : blocks_)
    caches.push_back(rank_->activation({max_positions, block.cache_width()}));
  return caches;
}

Tensor Stage::forward_cached(const Tensor& tokens, Tensor input, std::int64_t position,
                             const std::vector<Tensor>& caches) const {
  const Tensor positions(rank_->arena(), MemoryCategory::activations, DType::i32, {tokens.numel()});
  std::vector<std::int32_t> places(static_cast<std::size_t>(tokens.numel()));
  std::iota(places.begin(), places.end(), static_cast<std::int32_t>(position));
  copy_from_host(places, positions);
  Tensor x = has_embedding() ? embed(tokens, positions) : std::move(input);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto use = parameters_->use(block_group(i));
    x = blocks_[i].forward_cached(positions, position, x, caches[i]);
  }
  return x;
}

void Stage::take_routing_counts(std::vector<RoutingCounts>& counts) const {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].experts() == nullptr) continue;
    counts.push_back(blocks_[i].experts()->take_counts());
    counts.back().layer = first_layer_ + static_cast<std::int64_t>(i);
  }
}

MovedCopies Stage::take_moved_copies() const {
  MovedCopies moved;
  for (const TransformerBlock& block : blocks_)
    if (block.experts() != nullptr) moved += block.experts()->take_moved();
  return moved;
}

void Stage::begin_step() const {
  for (const TransformerBlock& block : blocks_)
    if (block.experts() != nullptr) block.experts()->begin_step();
}

void Stage::balance_routers(const std::vector<RoutingCounts>& counts) const {
  for (const RoutingCounts& c : counts) {
    const std::int64_t i = c.layer - first_layer_;
    if (i >= 0 && i < std::ssize(blocks_)) blocks_[static_cast<std::size_t>(i)].experts()->balance(c.routed);
  }
}

void Stage::take_router_biases(RouterBiases& biases) const {
  for (std::size_t i = 0; i < blocks_.size(); ++i)
    if (const ExpertParallel* experts = blocks_[i].experts(); experts != nullptr && !experts->bias().empty())
      biases[first_layer_ + static_cast<std::int64_t>(i)] = experts->bias();
}

void Stage::set_router_biases(const RouterBiases& biases) const {
  for (const auto& [layer, bias] : biases) {
    const std::int64_t i = layer - first_layer_;
    if (i >= 0 && i < std::ssize(blocks_)) blocks_[static_cast<std::size_t>(i)].experts()->set_bias(bias);
  }
}

void Stage::watch_routing(RoutingWatch* watch) const {
  for (std::size_t i = 0; i < blocks_.size(); ++i)
    if (const ExpertParallel* experts = blocks_[i].experts(); experts != nullptr)
      experts->watch_routing(first_layer_ + static_cast<std::int64_t>(i), watch);
}

Tensor Stage::logits(const Tensor& input) const {
  const auto use = parameters_->use(parameters_->output_group());
  return head_->logits(input, 1);
}

}  // namespace echelon
