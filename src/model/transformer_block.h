// One transformer layer: x + attention(norm(x)), then + mlp(norm(.)), in GPT-2's and Llama's form, cut over
// tp. No tape: what forward saves is a value handed in, so any number of microbatches can be in flight.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "layer/attention.h"
#include "layer/mlp.h"
#include "layer/norm.h"
#include "model/microbatch.h"
#include "model/parameters.h"
#include "parallel/expert_parallel.h"
#include "parallel/tensor_parallel.h"
#include "spec/plan.h"

namespace echelon {

class TransformerBlock {
 public:
  // What forward keeps for the backward pass of one microbatch: x alone where whole layers are recomputed. N
  // rows of tokens, R <= N of them in the residual stream here. What the norms make of x and middle is
  // computed again, and under sequence parallelism gathered again (InputAgain).
  struct Saved {
    Tensor x, stats1;              // (R, C), (R, 1 or 2)
    Tensor core;                   // (N, (H + 2 Hkv) D): what attention computes with, see ContextParallel
    Tensor attended, lse;          // (N, H D), (N*H)
    Tensor middle, stats2;         // (R, C), (R, 1 or 2): the residual stream after attention
    Tensor hidden;                 // (N, F or 2F)
    ExpertParallel::Saved routed;  // in the place of `hidden` where there are experts
    // Weight gradients that backward_input left for backward_weight.
    std::vector<std::function<void()>> deferred;
  };

  TransformerBlock(const Rank& rank, const Plan& plan, const ParameterStore& parameters, std::int64_t layer,
                   TensorParallel tensor_parallel);

  // Passes pause where experts are exchanged (ExpertParallel); what they are given outlives them.
  Work<Tensor> forward(const Microbatch& microbatch, const Tensor& x, Saved& saved) const;
  // dy is the gradient of forward's result; returns the gradient of x. Leaves the weights' gradients in
  // saved.deferred.
  Work<Tensor> backward_input(const Microbatch& microbatch, const Tensor& dy, Saved& saved) const;
  static void backward_weight(Saved& saved);
  // Both at once: weight gradients are taken as soon as their inputs exist, so that these can go. dy may be
  // overwritten.
  Work<Tensor> backward(const Microbatch& microbatch, const Tensor& dy, Saved& saved) const;

  // Without gradients. One sequence: new tokens at consecutive positions (rows, i32) from `position` on, keys
  // and values kept in cache.
  Tensor forward_cached(const Tensor& positions, std::int64_t position, const Tensor& x,
                        const Tensor& cache) const;
  std::int64_t cache_width() const { return 2 * attention_.kv_width(); }

  // nullptr where the layer has an ordinary MLP.
  const ExpertParallel* experts() const { return experts_.get(); }

 private:
  enum class Weights { now, deferred };
  struct Attended {
    Tensor core, out, lse;
  };
  using AttentionCore = std::function<Attended(Tensor qkv)>;
  // Up to where the backward pass needs it, or to the end. The result is undefined in the first case.
  enum class Until { hidden, end };
  Work<Tensor> run_forward(const Tensor& x, std::int64_t rows, RoutedTokens tokens, AttentionCore core,
                           Saved* saved, Until until) const;
  // The gradient of the MLP's normed input over all rows, partial, and its weights' gradients; see
  // run_backward.
  using WeightGradient = ExpertParallel::WeightGradient;
  Tensor mlp_backward(const Tensor& dy, std::int64_t rows, Saved& saved, Weights when,
                      const WeightGradient& weight_gradient) const;
  Work<Tensor> experts_backward(const Tensor& dy, std::int64_t rows, Saved& saved,
                                const WeightGradient& weight_gradient) const;
  AttentionCore training_core(const Microbatch& microbatch) const;
  void attend(const Microbatch& microbatch, const Tensor& core, Tensor& out, Tensor& lse) const;
  Work<Tensor> run_backward(const Microbatch& microbatch, const Tensor& dy, Saved& saved, Weights when) const;
  // Of the N rows that the norm's output enters with.
  std::shared_ptr<InputAgain> input_again(const Norm& norm, const Tensor& x, const Tensor& stats,
                                          std::int64_t rows) const;
  // Input and weight gradient of a column-parallel product behind a norm, which is given by its input and
  // stats; returns the gradient of the norm's output.
  Tensor enter_backward(const Linear& product, Tensor d_product, const Norm& norm, const Tensor& x,
                        const Tensor& stats, Weights when, const WeightGradient& weight_gradient) const;

  const Rank* rank_;
  TensorParallel tensor_parallel_;
  Recompute recompute_;
  Norm norm1_, norm2_;
  Linear attention_in_, attention_out_;
  Attention attention_;
  ContextParallel context_parallel_;
  Mlp mlp_;
  std::unique_ptr<ExpertParallel> experts_;   // in its place
  Weight attention_out_bias_, mlp_out_bias_;  // added after the row-parallel sums; undefined for Llama
};

}  // namespace echelon
