// A mixture of experts in place of a layer's MLP (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538;
// GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668). A router sends each token to k of E MLPs,
// whose outputs are summed with the router's weights. If there is a shared MLP, all tokens go to it too, and
// its output may be multiplied by a sigmoid gate (Qwen2-MoE, https://arxiv.org/abs/2407.10671).
//
//   x --router--> choices, weights      copies of x, sorted by expert --experts--> rows --weights, sum--> y
//
// Experts are spread over the ep ranks of an expert group, which lies within dp x cp: copies travel to their
// experts and rows back (expert_exchange.h).
//
// Tensor parallelism cuts every expert as it cuts an MLP (expert tensor parallelism), so y is a partial sum.
// The router is whole on every rank, and may read more than what is sent (in_forward). A tp rank routes the
// rows of the residual stream that it holds. Under sequence parallelism the choices are exchanged: one
// all_gather of 2 k numbers per token forward, one reduce_scatter of k backward (without it, an all_reduce of
// k). Each rank computes the shared MLP's gate for all rows; its gradient adds one number per token to those
// k. If a scope's tokens lie on several cp ranks, balance counts are summed over cp, and if experts have a
// capacity, all choices are gathered over cp (2 k numbers per token).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/work.h"
#include "comm/rank.h"
#include "parallel/expert_exchange.h"
#include "parallel/routing_watch.h"
#include "parallel/tensor_parallel.h"
#include "parallel/whole_copies.h"
#include "parallel/whole_rows.h"
#include "spec/fp8.h"
#include "spec/plan.h"
#include "spec/token_router.h"

namespace echelon {

// What a layer's router did to this rank's tokens since the counts were last taken.
struct RoutingCounts {
  std::int64_t layer = 0;
  std::vector<double> routed, dropped;  // choices, by expert
  double away = 0;                      // copies that went to another rank
  // Of the router's losses over this rank's tokens; under sequence parallelism, over its rows.
  double loss_sum = 0;
};

class ExpertParallel {
 public:
  struct Weights {
    Weight gate;                   // (E, C)
    std::vector<Weight> in, out;   // of each expert here: (2F, C), (C, F); without a gate in is (F, C)
    Weight shared_in, shared_out;  // undefined without a shared MLP
    // Biases, undefined or empty if there are none: of the router (E), and of each expert here: (2F), and
    // columns of C: a range for each tp rank, which it adds to its part of the sum.
    Weight gate_bias = {};
    std::vector<Weight> in_bias = {}, out_bias = {};
    Range out_bias_columns = {};
    Weight shared_gate = {};  // (1, C); undefined: no gate
    // Under invariant numerics, the blocks of sums that tp cuts: over the hidden units of an expert and of
    // the shared MLP, in the output (`out`) and in the gradient of the input (`in`), and over as many parts
    // of out_bias's columns.
    SumBlocks in_sums = {}, out_sums = {}, shared_in_sums = {}, shared_out_sums = {}, out_bias_sums = {};
  };
  // What the forward pass keeps for the backward pass of one microbatch. N rows of tokens, of which this rank
  // routes R <= N.
  struct Saved {
    Tensor logits;               // (R, E)
    Tensor ids;                  // (N, k, i32), the chosen experts
    Tensor weights;              // (N, k)
    Tensor places, copies;       // (N, k, i32), (M, i32): see sort_by_expert
    ExpertBounds bounds;         // of all experts, among the copies
    std::vector<double> routed;  // of each scope: see num_routing_counts()
    ExpertExchange::Route route;
    // (rows, C), the input of this rank's experts, if it came from other ranks.
    Tensor taken;
    Tensor hidden;               // (rows, 2F); without an exchange, rows are copies
    Tensor shared_hidden;        // (N, 2F of the shared MLP)
    // (N, 1) of the shared MLP's gate, as a router with one expert.
    Tensor shared_logits, shared_ids, shared_weights;
    std::int64_t sequences = 0;  // of the microbatch
    std::shared_ptr<const WholeCopies> whole_copies;  // if gradients of experts need them

    // Visits the tensors with this microbatch's numbers, undefined ones too, except the places of whole
    // copies.
    template <class Visit>
    void each_tensor(const Visit& visit) const {
      for (const Tensor* tensor :
           {&logits, &ids, &weights, &places, &copies, &route.arrived, &route.rows, &taken, &hidden,
            &shared_hidden, &shared_logits, &shared_ids, &shared_weights})
        visit(*tensor);
    }
  };
  using WeightGradient = std::function<void(std::function<void()>)>;  // runs its argument now, or later

  ExpertParallel(const Rank& rank, const Plan& plan, TensorParallel tensor_parallel, Weights weights);

  // Routes this rank's rows of the normalised residual stream (R, C), of a microbatch of N rows. Generation
  // drops nothing.
  Saved route(const Tensor& normed_here, std::int64_t rows, const RoutedTokens& tokens) const;
  // From here on `watch` sees the layer's decisions in training; nullptr: nobody does. It outlives this.
  void watch_routing(std::int64_t layer, RoutingWatch* watch) const {
    layer_ = layer;
    watch_ = watch;
  }
  // Begins a training step: see count_forward().
  void begin_step() const;
  // Called in a forward pass, but not in its recomputation: counts what travels, and what the losses of the
  // global batch wait for.
  void count_forward(const Saved& saved) const;
  // Called when copies travel to the experts once more for recomputation, and when the experts' outputs
  // return once more.
  void count_again(const Saved& saved) const;
  void count_back_again(const Saved& saved) const;
  // The forward pass in two parts: from all rows (N, C) to the experts' hidden values, and from there to the
  // partial sum y (N, C). C is the width of what is sent, which differs from the router's if experts work on
  // a narrower form. These and backward_input() pause while whole rows travel; their arguments outlive them.
  Work<void> in_forward(const Tensor& normed, Saved& saved) const;
  Work<Tensor> out_forward(const Saved& saved) const;

  // From dy (N, C) to the partial gradient of the normalised rows (N, C), plus what the calls below need.
  struct Backward {
    Tensor d_normed;
    Tensor d_hidden, d_shared_hidden, d_weights, d_shared_weights;
  };
  Work<Backward> backward_input(const Tensor& dy, Saved& saved, SequenceSums sums,
                                const WeightGradient& weight_gradient) const;
  // Gradients of the first products' weights, from the normalised rows: of experts if all are on every rank,
  // and of the shared MLP. What experts received from other ranks was kept.
  void in_backward_weight(std::shared_ptr<InputAgain> normed, Saved& saved, Backward& backward,
                          const SequenceSums& sums, const WeightGradient& weight_gradient) const;
  // Backward through the router: adds to d_normed_here (R, C).
  void route_backward(const Tensor& normed_here, Saved& saved, Backward& backward,
                      const Tensor& d_normed_here, const SequenceSums& sums,
                      const WeightGradient& weight_gradient) const;

  // Loss-free balancing: moves the selection bias by the loads of all tokens of a step.
  void balance(const std::vector<double>& routed) const;
  // The selection bias (E); empty: none. A bias that was set takes part in choices even if it no longer
  // moves.
  const std::vector<double>& bias() const { return bias_; }
  void set_bias(const std::vector<double>& bias) const;

  // Takes the counts of backward passes, that is, of training only.
  RoutingCounts take_counts() const;
  // Takes the counts of all passes, for this rank's copies and experts.
  MovedCopies take_moved() const { return std::exchange(moved_, {}); }

 private:
  std::int64_t experts() const { return router_.num_experts(); }
  std::int64_t k() const { return router_.experts_per_token(); }
  RoutingCounts empty_counts() const;
  Tensor integers(std::vector<std::int64_t> shape) const;
  void share_choices(std::int64_t rows, Saved& saved) const;
  Tensor packed_choices(const Saved& saved) const;
  Tensor keep(const Saved& saved) const;
  Tensor keep_of_scopes(const Tensor& ids, const Tensor& weights, std::int64_t scopes) const;
  Tensor keep_of_sequences(const Saved& saved) const;
  void sort_and_count(const Tensor& kept, Saved& saved) const;
  std::vector<std::int32_t> even_counts(std::int64_t copies, std::int64_t scopes) const;
  RouterLosses losses(const Saved& saved) const;
  void begin_losses() const;
  void add_losses(const Saved& saved, RouterLosses terms, const SequenceSums& sums) const;
  std::span<const double> batch_counts() const;
  Tensor take(const Tensor& normed, const Saved& saved) const;
  Tensor by_place(const Tensor& weights, const Saved& saved) const;
  // Accumulates the gradients of this rank's experts.
  struct Adder {
    Kernels* kernels;
    SequenceSums sums;
    ExpertBounds bounds;  // of rows, by sequence where sums are
    const WholeRows& rows;
    std::shared_ptr<const WholeCopies> copies;  // if each rank sums a part of the columns
    void products(const std::vector<Weight>& weights, const Tensor& x, const Tensor& dy,
                  const OperandFormats& formats) const;
    void biases(const std::vector<Weight>& biases, const Tensor& dy) const;
  };
  Adder adder(const Saved& saved, const SequenceSums& sums) const;
  ExpertBounds bounds_by_run(const Saved& saved) const;
  void add_gate_bias(const Tensor& logits) const;
  // Under invariant numerics, rows must be summed over tp before the routing weights, and other experts'
  // outputs, apply. Each rank then has whole sums of some columns and contributes nothing to the others.
  bool sums_rows() const { return by_sequence_ && tensor_parallel_.size() > 1; }
  Tensor make_sum(std::vector<std::int64_t> shape) const {
    return sums_rows() ? rank_->statistic(std::move(shape)) : rank_->activation(std::move(shape));
  }
  Range columns_here(std::int64_t width) const {
    return sums_rows() ? split_range(width, tensor_parallel_.size(), tensor_parallel_.index())
                       : Range{0, width};
  }
  Tensor own_columns(const Tensor& term) const;
  Tensor rounded_columns(const Tensor& term) const;
  Tensor all_columns(const Tensor& own, std::int64_t width) const;
  // Rows of hidden units, and the blocks of sums over these.
  struct HiddenRows {
    Tensor hidden, d_activated;
    std::int64_t room;  // capacity in rows
    const SumBlocks &in_sums, &out_sums;
  };
  using BiasGradient = std::function<void(Range columns, const Tensor& d_weights)>;
  void weighted_backward(const HiddenRows& rows, const Tensor& weights, const Tensor& d_weights,
                         const SumBlocks& bias_sums, const BiasGradient& add_bias) const;
  void activation_backward(const Saved& saved, const Tensor& d_out, const Tensor& d_activated,
                           const Tensor& weights, const Tensor& d_weights) const;
  void activate(const Tensor& hidden, const Tensor& y) const;
  void weigh_shared(const Tensor& normed, Saved& saved) const;
  Tensor weighed(const Tensor& shared, const Saved& saved) const;
  void shared_gate_backward(const Tensor& normed_here, const Saved& saved, Backward& backward,
                            const Tensor& d_normed_here, const SequenceSums& sums,
                            const WeightGradient& weight_gradient) const;
  Tensor out_bias_columns(const Tensor& x) const {
    return x.column_range(weights_.out_bias_columns.begin, weights_.out_bias_columns.end);
  }
  void count(const Saved& saved) const;
  std::int64_t scopes(const Saved& saved) const {
    return balancing_.scope == BalanceScope::sequence ? saved.sequences : 1;
  }

  const Rank* rank_;
  TensorParallel tensor_parallel_;
  Balancing balancing_;
  struct Room {
    std::int64_t copies = 0, rows = 0;  // rows 0: as many as arrive
  };
  std::function<Room(std::int64_t sequences)> room_;
  std::int64_t seq_len_;
  std::vector<std::int64_t> positions_;  // of a sequence's tokens, by cp rank
  bool by_sequence_;                     // sums go sequence by sequence, under invariant numerics
  double loss_scale_;                    // the losses are means over the tokens of the global batch
  TokenRouter router_, shared_gate_;
  ExpertExchange exchange_;
  Activation activation_;  // also the shared MLP's: no model has both a shared MLP and clamps
  SwigluClamp clamp_;
  LayerFormats formats_;
  Weights weights_;
  WholeRows whole_rows_;
  PositionRuns runs_;
  // State of a step, like gradients; then state across steps, like weights.
  // Sum of the router's losses (1, f64), or one for each sequence of this rank; undefined: no losses.
  Tensor loss_sums_;
  mutable std::int64_t next_loss_ = 0;  // index of the next sequence in loss_sums_
  mutable RoutingCounts counts_;
  mutable MovedCopies moved_;
  mutable std::vector<double> batch_counts_;  // of this rank's forward passes; once known, of all ranks'
  mutable bool batch_is_known_ = false;
  mutable std::vector<double> bias_;  // (E); empty: none
  mutable RoutingWatch* watch_ = nullptr;
  mutable std::int64_t layer_ = 0;
};

}  // namespace echelon
