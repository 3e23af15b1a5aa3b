// What ExpertParallel allocates and sends, step by step as it runs: the twin of src/parallel/expert_parallel.
#pragma once

#include "plan/account.h"
#include "spec/plan.h"
#include "spec/traffic.h"

namespace echelon {

// The mixture of one layer for a microbatch of `sequences`. Where experts drop what is over their capacity
// there is room for as much as they may keep, whatever the router does; without a capacity every copy of a
// token has its place. So all sizes are known.
class ExpertCosts {
 public:
  ExpertCosts(const Plan& plan, std::int64_t sequences, const Coordinates& at);

  // Each in the place of the function of this name.
  void route(Account& account) const;
  void in_forward(Account& account) const;
  void out_forward(Account& account) const;  // the sum over all rows stays
  void backward_input(Account& account, bool keep) const;
  void in_backward_weight(Account& account, bool keep) const;
  void route_backward(Account& account, bool keep) const;
  // Deferred weight gradients, in their order, with what they read.
  void backward_weight(Account& account) const;
  // Whether there is an MLP that all tokens share. Only its weights' gradient needs the gradient of the sum
  // itself.
  bool shared() const { return shared_; }
  // What forward keeps.
  std::int64_t saved() const { return logits_ + choices_ + places_ + hidden_ + shared_hidden_; }

  // Sent on tp and cp.
  void add_forward_traffic(Traffic& traffic) const;
  void add_backward_traffic(Traffic& traffic) const;

 private:
  std::int64_t copies_list() const { return by_place_ / element_ * 4; }  // whose copy stands where

  bool shards_sequence_;
  int tp_, cp_, tp_rank_, cp_rank_;
  std::int64_t rows_, k_, element_;
  bool shared_;
  std::int64_t counts_;
  std::int64_t logits_, choices_here_, choices_, places_, kept_;  // ids and weights; places and copies
  std::int64_t copies_, whole_, hidden_, activated_, shared_hidden_, shared_activated_, by_place_, d_weights_,
      d_weights_here_;
};

}  // namespace echelon
