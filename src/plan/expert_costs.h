// What ExpertParallel allocates and sends, step by step as it runs: the twin of src/parallel/expert_parallel.
#pragma once

#include "plan/account.h"
#include "spec/plan.h"
#include "spec/traffic.h"

namespace echelon {

// The mixture of one layer for a microbatch of `sequences`. Where experts drop what is over their capacity
// there is room for as much as they may keep, whatever the router does; without a capacity every copy of a
// token has its place. So all sizes are known, but for one thing that the router decides: how many copies the
// experts of a rank get from other ranks (ep > 1) without a capacity. Here, as many as an even load brings.
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
  // Whether the gradients of first weights need all rows of the normed input: those of a shared MLP, and of
  // experts that are all here.
  bool needs_input_again() const { return shared_ || !exchanges(); }
  // What forward keeps.
  std::int64_t saved() const {
    return logits_ + choices_ + places_ + indices_ + (exchanges() ? taken_ : 0) + hidden_ + shared_hidden_;
  }

  // Sent on tp, cp and ep, without the copies themselves (traffic.h has their bytes). `whole`: up to the sum,
  // not only to the experts' hidden values.
  void add_forward_traffic(Traffic& traffic, bool whole) const;
  void add_backward_traffic(Traffic& traffic) const;
  // Copies that an even load sends to other ranks in a pass; it brings as many.
  std::int64_t away() const { return exchanges() ? away_ : 0; }

 private:
  bool exchanges() const { return ep_ > 1; }
  bool gathers_input() const { return shards_sequence_ && needs_input_again(); }
  std::int64_t copies_list() const { return by_place_ / element_ * 4; }  // whose copy stands where
  // ExpertExchange's functions of these names, between `copies` and `rows` bytes.
  enum class Way { waits, pauses };  // while things travel
  void dispatch(Account& account, std::int64_t copies, std::int64_t rows, Way way) const;
  void combine(Account& account, std::int64_t copies, std::int64_t rows, Way way) const;

  bool shards_sequence_;
  int tp_, cp_, ep_, tp_rank_, cp_rank_;
  std::int64_t rows_, k_, element_;
  bool shared_;
  std::int64_t counts_;  // of all scopes
  std::int64_t told_;    // bytes of what the host is told of the choices
  std::int64_t experts_, away_;
  std::int64_t logits_, choices_here_, choices_, places_, kept_;  // ids and weights; places and copies
  bool gathers_choices_;                                          // over cp
  // Bytes of copies here, and of rows of the experts here.
  std::int64_t copies_, by_place_, taken_, by_row_, indices_, hidden_, activated_;
  std::int64_t whole_, here_, shared_hidden_, shared_activated_, d_weights_, d_weights_here_;
};

}  // namespace echelon
