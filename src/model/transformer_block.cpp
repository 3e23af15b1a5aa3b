#include "model/transformer_block.h"

#include <fmt/core.h>

#include <utility>

namespace echelon {

// With fewer key/value heads than ranks, neighbouring ranks hold the same one.
static Attention heads_here(const ModelSpec& model, int tp) {
  return {model.num_heads / tp, std::max<std::int64_t>(model.num_kv_heads / tp, 1), model.head_dim,
          model.family == Family::gpt2 ? 0.0 : model.rope_theta};
}

namespace {

struct SwigluNames {
  const char *gate, *up, *down;
};
constexpr SwigluNames llama_names{"gate_proj.weight", "up_proj.weight", "down_proj.weight"};
constexpr SwigluNames mixtral_names{"w1.weight", "w3.weight", "w2.weight"};

Mlp swiglu(const ParameterStore& parameters, const std::string& at, const SwigluNames& names) {
  return {Linear(parameters.stacked({at + names.gate, at + names.up}), {}, WeightOrder::out_in),
          Linear(parameters.weight(at + names.down), {}, WeightOrder::out_in), Activation::swiglu};
}

std::unique_ptr<ExpertParallel> make_experts(const Rank& rank, const Plan& plan,
                                             const ParameterStore& parameters, const std::string& layer,
                                             const TensorParallel& tensor_parallel) {
  const bool mixtral = plan.model.experts == Experts::mixtral;
  const SwigluNames& names = mixtral ? mixtral_names : llama_names;
  const std::string home = layer + (mixtral ? "block_sparse_moe." : "mlp.");
  ExpertParallel::Weights weights{parameters.weight(home + "gate.weight"), {}, {}, {}};
  const Range here = experts_of(plan, rank.mesh().ep_index(rank.coordinates()));
  for (std::int64_t e = here.begin; e < here.end; ++e) {
    const std::string at = fmt::format("{}experts.{}.", home, e);
    weights.in.push_back(parameters.stacked({at + names.gate, at + names.up}));
    weights.out.push_back(parameters.weight(at + names.down));
  }
  if (plan.model.num_shared_experts > 0)
    weights.shared = swiglu(parameters, home + "shared_experts.", llama_names);
  return std::make_unique<ExpertParallel>(rank, plan, tensor_parallel, std::move(weights));
}

}  // namespace

TransformerBlock::TransformerBlock(const Rank& rank, const Plan& plan, const ParameterStore& parameters,
                                   std::int64_t layer, TensorParallel tensor_parallel)
    : rank_(&rank),
      tensor_parallel_(tensor_parallel),
      recompute_(plan.recompute),
      attention_(heads_here(plan.model, rank.size(Axis::tp))),
      context_parallel_(rank, plan, attention_) {
  const ModelSpec& model = plan.model;
  if (model.family == Family::gpt2) {
    const std::string at = fmt::format("transformer.h.{}.", layer);
    const auto weight = [&](const char* name) { return parameters.weight(at + name); };
    norm1_ = Norm(weight("ln_1.weight"), weight("ln_1.bias"), model.norm_eps);
    norm2_ = Norm(weight("ln_2.weight"), weight("ln_2.bias"), model.norm_eps);
    attention_in_ = Linear(weight("attn.c_attn.weight"), weight("attn.c_attn.bias"), WeightOrder::in_out);
    attention_out_ = Linear(weight("attn.c_proj.weight"), {}, WeightOrder::in_out);
    attention_out_bias_ = weight("attn.c_proj.bias");
    mlp_ = Mlp(Linear(weight("mlp.c_fc.weight"), weight("mlp.c_fc.bias"), WeightOrder::in_out),
               Linear(weight("mlp.c_proj.weight"), {}, WeightOrder::in_out), Activation::gelu);
    mlp_out_bias_ = weight("mlp.c_proj.bias");
  } else {
    const std::string at = fmt::format("model.layers.{}.", layer);
    const auto weight = [&](const char* name) { return parameters.weight(at + name); };
    norm1_ = Norm(weight("input_layernorm.weight"), {}, model.norm_eps);
    norm2_ = Norm(weight("post_attention_layernorm.weight"), {}, model.norm_eps);
    attention_in_ = Linear(parameters.stacked({at + "self_attn.q_proj.weight", at + "self_attn.k_proj.weight",
                                               at + "self_attn.v_proj.weight"}),
                           {}, WeightOrder::out_in);
    attention_out_ = Linear(weight("self_attn.o_proj.weight"), {}, WeightOrder::out_in);
    if (model.has_experts(layer))
      experts_ = make_experts(rank, plan, parameters, at, tensor_parallel);
    else
      mlp_ = swiglu(parameters, at + "mlp.", llama_names);
  }
}

static RoutedTokens tokens_of(const Microbatch& m) {
  return {m.sequences.batch, m.step, m.first_sample, m.positions};
}

Work<Tensor> TransformerBlock::run_forward(const Tensor& x, std::int64_t rows, RoutedTokens tokens,
                                           AttentionCore core, Saved* saved, Until until) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t here = x.rows(), width = x.cols();

  const Tensor stats1 = rank_->activation({here, norm1_.stats_width()});
  Tensor normed = rank_->activation({here, width});
  norm1_.forward(kernels, x, normed, stats1);
  normed = tensor_parallel_.enter(normed, rows).get();
  Tensor qkv = rank_->activation({rows, attention_.qkv_width()});
  attention_in_.forward(kernels, normed, qkv);
  normed = Tensor();
  if (attention_in_.bias().defined()) kernels.add_bias(attention_in_.bias(), qkv);
  Attended attended = core(std::exchange(qkv, {}));
  Tensor projected = rank_->activation({rows, width});
  attention_out_.forward(kernels, attended.out, projected);
  if (saved) {
    saved->x = x;
    saved->stats1 = stats1;
    saved->core = attended.core;
    if (recompute_ != Recompute::selective) {
      saved->attended = attended.out;
      saved->lse = attended.lse;
    }
  }
  attended = {};
  const Tensor middle = tensor_parallel_.leave(projected, rows).get();
  projected = Tensor();
  kernels.residual(x, middle, attention_out_bias_.value, middle);

  const Tensor stats2 = rank_->activation({here, norm2_.stats_width()});
  normed = rank_->activation({here, width});
  norm2_.forward(kernels, middle, normed, stats2);
  ExpertParallel::Saved routed;
  if (experts_) {
    routed = experts_->route(normed, rows, tokens);
    if (until == Until::end && tokens.sequences > 0) experts_->count_forward(routed);
  }
  normed = tensor_parallel_.enter(normed, rows).get();
  Tensor hidden;
  if (experts_) {
    co_await experts_->in_forward(normed, routed);
  } else {
    hidden = rank_->activation({rows, mlp_.hidden_width()});
    mlp_.in().forward(kernels, normed, hidden);
  }
  normed = Tensor();
  if (saved) {
    saved->middle = middle;
    saved->stats2 = stats2;
    saved->hidden = hidden;
    saved->routed = routed;
  }
  if (until == Until::hidden) {
    // The bias that the activation would add.
    if (!experts_ && mlp_.in().bias().defined()) kernels.add_bias(mlp_.in().bias(), hidden);
    co_return Tensor();
  }
  if (experts_) {
    projected = co_await experts_->out_forward(routed);
  } else {
    Tensor activated = rank_->activation({rows, mlp_.activated_width()});
    mlp_.activate(kernels, hidden, activated);
    projected = rank_->activation({rows, width});
    mlp_.out().forward(kernels, activated, projected);
  }
  const Tensor out = tensor_parallel_.leave(projected, rows).get();
  kernels.residual(middle, out, mlp_out_bias_.value, out);
  co_return out;
}

TransformerBlock::AttentionCore TransformerBlock::training_core(const Microbatch& microbatch) const {
  return [this, &microbatch](Tensor qkv) {
    attention_.rotate(rank_->kernels(), microbatch.positions, qkv);
    Attended attended;
    attended.core = context_parallel_.enter(microbatch.sequences, std::move(qkv));
    attend(microbatch, attended.core, attended.out, attended.lse);
    return attended;
  };
}

void TransformerBlock::attend(const Microbatch& microbatch, const Tensor& core, Tensor& out,
                              Tensor& lse) const {
  out = rank_->activation({microbatch.rows(), attention_.width()});
  lse = rank_->activation({microbatch.rows() * attention_.num_heads()});
  context_parallel_.forward(microbatch.sequences, core, out, lse);
}

Work<Tensor> TransformerBlock::forward(const Microbatch& microbatch, const Tensor& x, Saved& saved) const {
  if (recompute_ != Recompute::full)
    return run_forward(x, microbatch.rows(), tokens_of(microbatch), training_core(microbatch), &saved,
                       Until::end);
  saved.x = x;
  return run_forward(x, microbatch.rows(), tokens_of(microbatch), training_core(microbatch), nullptr,
                     Until::end);
}

Tensor TransformerBlock::forward_cached(const Tensor& positions, std::int64_t position, const Tensor& x,
                                        const Tensor& cache) const {
  const auto core = [&](const Tensor& qkv) {
    Attended attended{qkv, rank_->activation({x.rows(), attention_.width()}),
                      rank_->activation({x.rows() * attention_.num_heads()})};
    attention_.rotate(rank_->kernels(), positions, qkv);
    attention_.forward_cached(rank_->kernels(), position, qkv, cache, attended.out, attended.lse);
    return attended;
  };
  return run_forward(x, x.rows(), {}, core, nullptr, Until::end).finish();
}

std::shared_ptr<InputAgain> TransformerBlock::input_again(const Norm& norm, const Tensor& x,
                                                          const Tensor& stats, std::int64_t rows) const {
  const Tensor normed = rank_->activation({x.rows(), x.cols()});
  norm.forward_again(rank_->kernels(), x, stats, normed);
  return std::make_shared<InputAgain>(tensor_parallel_, normed, rows);
}

Tensor TransformerBlock::enter_backward(const Linear& product, Tensor d_product, const Norm& norm,
                                        const Tensor& x, const Tensor& stats, Weights when,
                                        const WeightGradient& weight_gradient) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = d_product.rows();
  std::shared_ptr<InputAgain> input = input_again(norm, x, stats, rows);
  if (when == Weights::now) input->begin();  // it travels beside the next product
  Tensor d_normed = rank_->activation({rows, x.cols()});
  product.backward_input(kernels, d_product, d_normed);
  // The sum over tp is under way while the weight gradient is computed.
  InFlight entering = tensor_parallel_.enter_backward(std::exchange(d_normed, {}), rows);
  weight_gradient([&kernels, product, input = std::exchange(input, {}), d = std::exchange(d_product, {})] {
    product.backward_weight(kernels, input->whole(), d);
  });
  return entering.get();
}

Work<Tensor> TransformerBlock::backward_input(const Microbatch& microbatch, const Tensor& dy,
                                              Saved& saved) const {
  return run_backward(microbatch, dy, saved, Weights::deferred);
}

void TransformerBlock::backward_weight(Saved& saved) {
  for (auto& gradient : saved.deferred) {
    gradient();
    gradient = nullptr;  // lets go of its tensors
  }
  saved.deferred.clear();
}

Work<Tensor> TransformerBlock::backward(const Microbatch& microbatch, const Tensor& dy, Saved& saved) const {
  return run_backward(microbatch, dy, saved, Weights::now);
}

Tensor TransformerBlock::mlp_backward(const Tensor& dy, std::int64_t rows, Saved& saved, Weights when,
                                      const WeightGradient& weight_gradient) const {
  Kernels& kernels = rank_->kernels();
  Tensor d_projected = tensor_parallel_.leave_backward(dy, rows).get();
  if (mlp_out_bias_.defined()) kernels.bias_gradient(dy, mlp_out_bias_.gradient);
  Tensor d_activated = rank_->activation({rows, mlp_.activated_width()});
  mlp_.out().backward_input(kernels, d_projected, d_activated);
  Mlp::Gradients mlp = mlp_.activate_backward(kernels, saved.hidden, d_activated);
  saved.hidden = d_activated = Tensor();
  weight_gradient(
      [&k = kernels, out = mlp_.out(), x = mlp.activated, d = d_projected] { out.backward_weight(k, x, d); });
  mlp.activated = d_projected = Tensor();
  return enter_backward(mlp_.in(), std::exchange(mlp.d_hidden, {}), norm2_, saved.middle, saved.stats2, when,
                        weight_gradient);
}

Work<Tensor> TransformerBlock::experts_backward(const Tensor& dy, std::int64_t rows, Saved& saved,
                                                const WeightGradient& weight_gradient) const {
  ExpertParallel::Backward experts;
  {
    const Tensor d_projected = tensor_parallel_.leave_backward(dy, rows).get();
    experts = co_await experts_->backward_input(d_projected, saved.routed, weight_gradient);
  }
  InFlight entering = tensor_parallel_.enter_backward(std::exchange(experts.d_normed, {}), rows);
  std::shared_ptr<InputAgain> input = input_again(norm2_, saved.middle, saved.stats2, rows);
  const Tensor normed_here = input->here();
  experts_->in_backward_weight(std::exchange(input, {}), saved.routed, experts, weight_gradient);
  const Tensor d_normed = entering.get();
  experts_->route_backward(normed_here, saved.routed, experts, d_normed, weight_gradient);
  co_return d_normed;
}

Work<Tensor> TransformerBlock::run_backward(const Microbatch& microbatch, const Tensor& dy, Saved& saved,
                                            Weights when) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = microbatch.rows();
  const WeightGradient weight_gradient = [&](std::function<void()> gradient) {
    if (when == Weights::now)
      gradient();
    else
      saved.deferred.push_back(std::move(gradient));
  };
  // The residual branch's gradient. A deferred weight gradient still reads dy, so it then needs a copy to add
  // to.
  const auto branch = [&](const Tensor& d) {
    if (when == Weights::now) return d;
    const Tensor own = rank_->activation({d.rows(), d.cols()});
    kernels.copy(d, own);
    return own;
  };

  if (recompute_ == Recompute::full)
    co_await run_forward(saved.x, rows, tokens_of(microbatch), training_core(microbatch), &saved,
                         Until::hidden);

  Tensor d_normed;
  if (experts_)
    d_normed = co_await experts_backward(dy, rows, saved, weight_gradient);
  else
    d_normed = mlp_backward(dy, rows, saved, when, weight_gradient);
  Tensor d_middle = branch(dy);
  norm2_.backward_weight(kernels, d_normed, saved.middle, saved.stats2);
  norm2_.backward_input(kernels, d_normed, saved.middle, saved.stats2, d_middle);
  saved.middle = saved.stats2 = d_normed = Tensor();

  // Attention.
  Tensor d_projected = tensor_parallel_.leave_backward(d_middle, rows).get();
  if (attention_out_bias_.defined()) kernels.bias_gradient(d_middle, attention_out_bias_.gradient);
  if (recompute_ == Recompute::selective) attend(microbatch, saved.core, saved.attended, saved.lse);
  Tensor d_attended = rank_->activation({rows, attention_.width()});
  attention_out_.backward_input(kernels, d_projected, d_attended);
  weight_gradient([&k = kernels, out = attention_out_, x = saved.attended, d = d_projected] {
    out.backward_weight(k, x, d);
  });
  d_projected = Tensor();
  Tensor delta = context_parallel_.delta(microbatch.sequences, saved.attended, d_attended);
  saved.attended = Tensor();
  Tensor d_qkv = rank_->activation({rows, attention_.qkv_width()});
  context_parallel_.backward(microbatch.sequences, saved.core, std::move(d_attended), saved.lse,
                             std::move(delta), d_qkv);
  attention_.rotate_back(kernels, microbatch.positions, d_qkv);
  saved.core = saved.lse = Tensor();
  d_normed = enter_backward(attention_in_, std::exchange(d_qkv, {}), norm1_, saved.x, saved.stats1, when,
                            weight_gradient);
  Tensor dx = branch(d_middle);
  norm1_.backward_weight(kernels, d_normed, saved.x, saved.stats1);
  norm1_.backward_input(kernels, d_normed, saved.x, saved.stats1, dx);
  saved.x = saved.stats1 = Tensor();
  co_return dx;
}

}  // namespace echelon
