#include "train/stage.h"

namespace echelon {

Stage::Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const Faults& faults)
    : rank_(&rank), tensor_parallel_(rank, plan.sequence_parallel) {
  const ModelSpec& model = plan.model;
  const bool gpt2 = model.family == Family::gpt2;
  const std::string table = gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
  const int tp = rank.size(Axis::tp), index = rank.coordinate(Axis::tp);
  const std::int64_t first_id = local_ranges(parameters.find(table).spec, tp, index)[0].begin +
                                (index > 0 ? faults.vocabulary_shift : 0);
  embedding_.emplace(rank, tensor_parallel_, parameters.weight(table), first_id);
  if (gpt2) positions_ = parameters.weight("transformer.wpe.weight");
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
    blocks_.emplace_back(rank, model, parameters, layer, tensor_parallel_);
  const Norm norm = gpt2 ? Norm(parameters.weight("transformer.ln_f.weight"),
                                parameters.weight("transformer.ln_f.bias"), model.norm_eps)
                         : Norm(parameters.weight("model.norm.weight"), {}, model.norm_eps);
  head_.emplace(rank, tensor_parallel_, norm,
                parameters.weight(model.tied_embedding ? table : "lm_head.weight"), first_id);
}

Tensor Stage::positions_here(std::int64_t rows, std::int64_t seq_len, std::int64_t first_position) const {
  const Range here = tensor_parallel_.rows_here(rows);
  const Tensor ids(rank_->arena(), MemoryCategory::activations, DType::i32, {here.size()});
  for (std::int64_t i = 0; i < here.size(); ++i)
    ids.data<std::int32_t>()[i] = static_cast<std::int32_t>(first_position + (here.begin + i) % seq_len);
  return ids;
}

Tensor Stage::embed(const Tensor& tokens, std::int64_t seq_len, std::int64_t first_position) const {
  const Tensor x = embedding_->forward(tokens);
  if (positions_.defined()) {
    const Tensor positions = rank_->activation({x.rows(), x.cols()});
    rank_->kernels().embedding(positions_here(tokens.numel(), seq_len, first_position), positions_.value, 0,
                               positions);
    rank_->kernels().add(positions, x);
  }
  return x;
}

void Stage::embed_backward(const Microbatch& microbatch, const Tensor& dx) const {
  if (positions_.defined())
    rank_->kernels().embedding_backward(positions_here(microbatch.rows(), microbatch.seq_len, 0), dx, 0,
                                        positions_.gradient);
  embedding_->backward(microbatch.tokens, dx);
}

void Stage::forward(const Microbatch& microbatch, Saved& saved) const {
  saved.blocks.resize(blocks_.size());
  Tensor x = embed(microbatch.tokens, microbatch.seq_len, 0);
  for (std::size_t i = 0; i < blocks_.size(); ++i) x = blocks_[i].forward(microbatch, x, saved.blocks[i]);
  saved.out = x;
}

double Stage::backward(const Microbatch& microbatch, double gradient_scale, Saved& saved,
                       const std::function<void(int group)>& group_done) const {
  OutputHead::Result head = head_->loss_and_gradient(saved.out, microbatch.targets, gradient_scale);
  saved.out = Tensor();
  const int head_group = static_cast<int>(blocks_.size()) + 1;
  group_done(head_group);
  Tensor dx = std::move(head.dx);
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    dx = blocks_[i].backward(microbatch, dx, saved.blocks[i]);
    group_done(static_cast<int>(i) + 1);
  }
  embed_backward(microbatch, dx);
  group_done(0);
  return head.loss_sum;
}

double Stage::evaluate(const Microbatch& microbatch) const {
  Tensor x = embed(microbatch.tokens, microbatch.seq_len, 0);
  for (const TransformerBlock& block : blocks_) {
    TransformerBlock::Saved dropped;
    x = block.forward(microbatch, x, dropped);
  }
  return head_->loss(x, microbatch.targets);
}

std::vector<Tensor> Stage::make_caches(std::int64_t max_positions) const {
  std::vector<Tensor> caches;
  for (const TransformerBlock& block : blocks_)
    caches.push_back(rank_->activation({max_positions, block.cache_width()}));
  return caches;
}

Tensor Stage::next_logits(const Tensor& tokens, std::int64_t position,
                          const std::vector<Tensor>& caches) const {
  Tensor x = embed(tokens, tokens.numel(), position);
  for (std::size_t i = 0; i < blocks_.size(); ++i) x = blocks_[i].forward_cached(position, x, caches[i]);
  return head_->logits(x, 1);
}

}  // namespace echelon
