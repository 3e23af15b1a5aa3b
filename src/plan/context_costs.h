// What ContextParallel allocates and sends, step by step as it runs: the twin of src/parallel/context_*.
#pragma once

#include "plan/account.h"
#include "spec/plan.h"
#include "spec/traffic.h"

namespace echelon {

// The attention of one layer for a microbatch of `sequences`.
class ContextCosts {
 public:
  ContextCosts(const Plan& plan, std::int64_t sequences, const Coordinates& at);

  // Bytes of what attention computes with, of its output and of its log-sum-exp, on this rank.
  std::int64_t core() const { return core_; }
  std::int64_t attended() const { return attended_; }
  std::int64_t lse() const { return lse_; }

  // Each in the place of the function of this name. [q | k | v] goes and the core stays...
  void enter(Account& account) const;
  void forward(Account& account) const;
  // ... and the output's gradient and delta go.
  void backward(Account& account) const;

  // Sent on cp. A pass that is run again enters again only where a whole layer is.
  void add_forward_traffic(Traffic& traffic, bool enters) const;
  void add_backward_traffic(Traffic& traffic) const;

 private:
  void exchange(Account& account, std::int64_t bytes) const;
  void block(Account& account, int source) const;
  void core_forward(Account& account) const;
  void core_backward(Account& account) const;
  int source(int step) const { return (ring_index_ + ring_ - step) % ring_; }
  void add(Traffic& traffic, Verb verb, std::int64_t bytes, int calls = 1) const;

  ContextLayout layout_;
  bool gathers_, documents_;
  int ring_, ulysses_, ring_index_;
  std::int64_t sequences_, qkv_ = 0, core_ = 0, attended_ = 0, lse_ = 0;
  std::int64_t q_ = 0, kv_head_ = 0;  // an all-to-all's buffer for q or the output, for k or v
  std::int64_t kv_ = 0;               // keys and values of one ring index
};

}  // namespace echelon
