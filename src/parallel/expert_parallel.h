// A mixture of experts in the place of a layer's MLP (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538;
// GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668): a router sends each token to k of E MLPs,
// whose outputs are added with the router's weights, and to the MLP that all tokens share where there is one,
// whose output may be weighed by a sigmoid of the token's own (Qwen2-MoE, https://arxiv.org/abs/2407.10671).
//
//   x --router--> choices, weights      copies of x, sorted by expert --experts--> rows --weights, sum--> y
//
// Experts are spread over the ep ranks of an expert group, which lies over dp and cp: copies travel to their
// experts and rows back (expert_exchange.h).
//
// Tensor parallelism cuts every expert as it cuts an MLP (expert tensor parallelism): y is a partial sum. The
// router is whole, and may read more than what is sent (in_forward); a rank of the tp group routes the rows
// of the residual stream that it holds, and its choices go to the others under sequence parallelism: one
// all_gather of 2 k numbers a token forward, one reduce_scatter of k backward (an all_reduce of k without
// sequence parallelism). What weighs the shared MLP each rank makes of all rows, and its gradient takes one
// number a token more, as the k do. Where a scope's tokens lie on several cp ranks, their balance counts are
// summed over cp, and where experts have a capacity all choices are gathered there (2 k numbers a token).
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

// What a layer's routers did since the numbers were last taken, of this rank's tokens.
struct RoutingCounts {
  std::int64_t layer = 0;
  std::vector<double> routed, dropped;  // choices of each expert
  double away = 0;                      // copies that went to another rank
  double loss_sum = 0;  // of the routers' losses, over tokens; of this rank's rows under sequence parallelism
};

class ExpertParallel {
 public:
  struct Weights {
    Weight gate;                   // (E, C)
    std::vector<Weight> in, out;   // of each expert that is here (2F, C), (C, F); without a gate (F, C)
    Weight shared_in, shared_out;  // undefined where no MLP is shared
    // Undefined, and empty, where there are none: of the router (E), and of each expert that is here (2F),
    // (columns of C, a range for each tp rank, which adds them to its part of the sum).
    Weight gate_bias = {};
    std::vector<Weight> in_bias = {}, out_bias = {};
    Range out_bias_columns = {};
    Weight shared_gate = {};  // (1, C); undefined: the shared MLP counts once
    // Under invariant numerics the blocks of sums over what tp cuts: over hidden units of an expert and of
    // the shared MLP, behind them (`out`) and in the gradient before them (`in`), and over columns of
    // out_bias, as many.
    SumBlocks in_sums = {}, out_sums = {}, shared_in_sums = {}, shared_out_sums = {}, out_bias_sums = {};
  };
  // What forward keeps for the backward pass of one microbatch. N rows of tokens, R <= N of them routed here.
  struct Saved {
    Tensor logits;               // (R, E)
    Tensor ids;                  // (N, k, i32), chosen
    Tensor weights;              // (N, k)
    Tensor places, copies;       // (N, k, i32), (M, i32): see sort_by_expert
    ExpertBounds bounds;         // of all experts, among the copies
    std::vector<double> routed;  // of each scope: see num_routing_counts()
    ExpertExchange::Route route;
    Tensor taken;                // (rows, C), what the experts here got, where it came from other ranks
    Tensor hidden;               // (rows, 2F); without an exchange, rows are copies
    Tensor shared_hidden;        // (N, 2F of the shared MLP)
    Tensor shared_logits, shared_ids, shared_weights;  // (N, 1) of what weighs it: a router of one expert
    std::int64_t sequences = 0;  // of the microbatch
    std::shared_ptr<const WholeCopies> whole_copies;  // where experts' gradients want them

    // Those that are numbers of this microbatch, undefined ones too; not what says where whole copies lie.
    template <class Visit>
    void each_tensor(const Visit& visit) const {
      for (const Tensor* tensor :
           {&logits, &ids, &weights, &places, &copies, &route.arrived, &route.rows, &taken, &hidden,
            &shared_hidden, &shared_logits, &shared_ids, &shared_weights})
        visit(*tensor);
    }
  };
  using WeightGradient = std::function<void(std::function<void()>)>;  // takes it now, or later

  ExpertParallel(const Rank& rank, const Plan& plan, TensorParallel tensor_parallel, Weights weights);

  // Chooses for the rows of the normed residual stream that are here (R, C), of a microbatch of N rows. In
  // generation nothing is dropped.
  Saved route(const Tensor& normed_here, std::int64_t rows, const RoutedTokens& tokens) const;
  // From here on, of the layer's decisions in training; nullptr: nobody. It outlives this.
  void watch_routing(std::int64_t layer, RoutingWatch* watch) const {
    layer_ = layer;
    watch_ = watch;
  }
  // A training step begins: see count_forward().
  void begin_step() const;
  // In a forward pass, not where it is made again: what travels, and what the losses of the global batch wait
  // for.
  void count_forward(const Saved& saved) const;
  // Where its copies travel to the experts once more, and where what they made comes back once more.
  void count_again(const Saved& saved) const;
  void count_back_again(const Saved& saved) const;
  // From all rows (N, C) up to the experts' hidden values, and from there to the partial sum y (N, C): of
  // what is sent, C is not the router's where experts work on something narrower. These
  // and backward_input() pause while whole rows travel; what they are given outlives them.
  Work<void> in_forward(const Tensor& normed, Saved& saved) const;
  Work<Tensor> out_forward(const Saved& saved) const;

  // From dy (N, C) to the partial gradient of the normed rows (N, C). Leaves what the rest needs.
  struct Backward {
    Tensor d_normed;
    Tensor d_hidden, d_shared_hidden, d_weights, d_shared_weights;
  };
  Work<Backward> backward_input(const Tensor& dy, Saved& saved, SequenceSums sums,
                                const WeightGradient& weight_gradient) const;
  // The weights of the first products, from the normed rows: of experts that are all here, and of the shared
  // one. What experts got from other ranks is kept.
  void in_backward_weight(std::shared_ptr<InputAgain> normed, Saved& saved, Backward& backward,
                          const SequenceSums& sums, const WeightGradient& weight_gradient) const;
  // Through the router: adds to d_normed_here (R, C).
  void route_backward(const Tensor& normed_here, Saved& saved, Backward& backward,
                      const Tensor& d_normed_here, const SequenceSums& sums,
                      const WeightGradient& weight_gradient) const;

  // Loss-free balancing: moves the bias that steers the choices by the loads of a step, over all its tokens.
  void balance(const std::vector<double>& routed) const;
  // (E); empty: none. One that is set steers also where it does not move any more.
  const std::vector<double>& bias() const { return bias_; }
  void set_bias(const std::vector<double>& bias) const;

  // What has been counted in backward passes, which are those of training.
  RoutingCounts take_counts() const;
  // In all passes, of this rank's copies and experts.
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
  // What adds to the gradients of the experts here.
  struct Adder {
    Kernels* kernels;
    SequenceSums sums;
    ExpertBounds bounds;  // of rows, by sequence where sums are
    const WholeRows& rows;
    std::shared_ptr<const WholeCopies> copies;  // where each rank adds up a part
    void products(const std::vector<Weight>& weights, const Tensor& x, const Tensor& dy,
                  const OperandFormats& formats) const;
    void biases(const std::vector<Weight>& biases, const Tensor& dy) const;
  };
  Adder adder(const Saved& saved, const SequenceSums& sums) const;
  ExpertBounds bounds_by_run(const Saved& saved) const;
  void add_gate_bias(const Tensor& logits) const;
  // Under invariant numerics rows are whole before the router's weights, and other experts, are added to
  // them, so what tp cuts is summed there: each rank then has some columns, and in the end nothing of the
  // others.
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
  // Rows of hidden units, and what sums over these are cut into.
  struct HiddenRows {
    Tensor hidden, d_activated;
    std::int64_t room;  // for rows
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
    std::int64_t copies = 0, rows = 0;  // rows 0: for as many as come
  };
  std::function<Room(std::int64_t sequences)> room_;
  std::int64_t seq_len_;
  std::vector<std::int64_t> positions_;  // of a sequence's tokens, by cp rank
  bool by_sequence_;                     // sums, under invariant numerics
  double loss_scale_;                    // the losses are means over the tokens of the global batch
  TokenRouter router_, shared_gate_;
  ExpertExchange exchange_;
  Activation activation_;  // the shared MLP's too: who has one has no clamps
  SwigluClamp clamp_;
  LayerFormats formats_;
  Weights weights_;
  WholeRows whole_rows_;
  PositionRuns runs_;
  // State of a step, as gradients are; and what steps have made of them, as weights are.
  // (1, f64) of the routers' losses, or one for each sequence of this rank; undefined: there are none.
  Tensor loss_sums_;
  mutable std::int64_t next_loss_ = 0;  // the sequence whose loss is the next
  mutable RoutingCounts counts_;
  mutable MovedCopies moved_;
  mutable std::vector<double> batch_counts_;  // of the forward passes here; of all, once they are known
  mutable bool batch_is_known_ = false;
  mutable std::vector<double> bias_;  // (E); empty: none
  mutable RoutingWatch* watch_ = nullptr;
  mutable std::int64_t layer_ = 0;
};

}  // namespace echelon
