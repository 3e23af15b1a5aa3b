#include "plan/context_costs.h"

#include <algorithm>

namespace echelon {

ContextCosts::ContextCosts(const Plan& plan, std::int64_t sequences, const Coordinates& at)
    : layout_(plan),
      gathers_(plan.context_kind == ContextKind::allgather),
      documents_(plan.mask == AttentionMask::document),
      ring_(layout_.ring()),
      ulysses_(layout_.ulysses()),
      ring_index_(layout_.ring_index(at.cp)),
      sequences_(sequences) {
  const ModelSpec& m = plan.model;
  const std::int64_t tp = plan.mesh.size(Axis::tp), e = element_bytes(plan.dtype);
  const std::int64_t rows = sequences * layout_.tokens_here(), core_rows = sequences * layout_.core_tokens();
  const std::int64_t heads = m.num_heads / tp, kv_heads = std::max<std::int64_t>(m.num_kv_heads / tp, 1);
  const std::int64_t core_kv_heads = std::max<std::int64_t>(kv_heads / ulysses_, 1);
  qkv_ = rows * (heads + 2 * kv_heads) * m.head_dim * e;
  core_ = core_rows * (heads / ulysses_ + 2 * core_kv_heads) * m.head_dim * e;
  attended_ = q_ = rows * heads * m.head_dim * e;
  lse_ = rows * heads * e;
  kv_head_ = core_rows * core_kv_heads * m.head_dim * e;
  kv_ = 2 * kv_head_;
}

// What is packed and what arrives.
void ContextCosts::exchange(Account& account, std::int64_t bytes) const {
  account.allocate(2 * bytes);
  account.free(2 * bytes);
}

void ContextCosts::enter(Account& account) const {
  if (ulysses_ == 1) return;
  account.allocate(core_);
  exchange(account, q_);
  exchange(account, kv_head_);
  exchange(account, kv_head_);
  account.free(qkv_);
}

void ContextCosts::forward(Account& account) const {
  if (ulysses_ == 1) return core_forward(account);
  account.allocate(attended_);
  core_forward(account);
  exchange(account, q_);
  account.free(attended_);
}

void ContextCosts::backward(Account& account) const {
  if (ulysses_ == 1) {
    core_backward(account);
    account.free(attended_ + lse_);
    return;
  }
  account.allocate(attended_);
  exchange(account, q_);
  account.free(attended_);
  account.allocate(3 * lse_);
  account.free(2 * lse_);
  account.free(lse_);
  account.allocate(core_);
  core_backward(account);
  account.free(attended_ + lse_);
  exchange(account, q_);
  exchange(account, kv_head_);
  exchange(account, kv_head_);
  account.free(core_);
}

// First keys of documents, while a pair of runs is computed.
void ContextCosts::block(Account& account, int source) const {
  if (!documents_ || sequences_ == 0) return;
  const std::vector<PositionRun> runs = layout_.runs(ring_index_);
  for (const ContextLayout::RunPair& pair : layout_.pairs(ring_index_, source)) {
    account.allocate(runs[pair.queries].size * 4);
    account.free(runs[pair.queries].size * 4);
  }
}

void ContextCosts::core_forward(Account& account) const {
  if (ring_ == 1) return;
  account.allocate(kv_);
  if (gathers_) {
    account.allocate(ring_ * kv_);
    account.free(kv_);
    for (int step = 0; step < ring_; ++step) block(account, source(step));
    account.free(ring_ * kv_);
    return;
  }
  for (int step = 0; step < ring_; ++step) {
    if (step + 1 < ring_) account.allocate(kv_);
    block(account, source(step));
    account.free(kv_);
  }
}

void ContextCosts::core_backward(Account& account) const {
  if (ring_ == 1) return;
  account.allocate(kv_);
  if (gathers_) {
    account.allocate(2 * ring_ * kv_);
    for (int index = 0; index < ring_; ++index) block(account, index);
    account.free(2 * ring_ * kv_);
    account.free(kv_);
    return;
  }
  for (int step = 0; step < ring_; ++step) {
    const bool goes_on = step + 1 < ring_;
    if (step > 1) account.allocate(kv_);  // what earlier ranks have added up
    if (goes_on) account.allocate(kv_);   // the next block
    if (step > 0) account.allocate(kv_);  // this rank's part
    block(account, source(step));
    if (step > 1) account.free(2 * kv_);  // what earlier ranks had, and the gradient that has left
    if (goes_on) account.free(kv_);       // the block here
  }
  account.allocate(kv_);  // of this rank's own keys and values, from the others
  account.free(3 * kv_);  // it, what left last, the last block
}

void ContextCosts::add(Traffic& traffic, Verb verb, std::int64_t bytes, int calls) const {
  traffic.at(Axis::cp, verb).calls += calls;
  traffic.at(Axis::cp, verb).bytes += bytes;
}

void ContextCosts::add_forward_traffic(Traffic& traffic, bool enters) const {
  const auto others = [&](std::int64_t bytes) { return bytes / ulysses_ * (ulysses_ - 1); };
  if (ulysses_ > 1) {
    if (enters) add(traffic, Verb::all_to_all, others(q_) + 2 * others(kv_head_), 3);
    add(traffic, Verb::all_to_all, others(q_));
  }
  if (ring_ == 1) return;
  if (gathers_) return add(traffic, Verb::all_gather, (ring_ - 1) * kv_);
  add(traffic, Verb::send, (ring_ - 1) * kv_, ring_ - 1);
  add(traffic, Verb::recv, 0, ring_ - 1);
}

void ContextCosts::add_backward_traffic(Traffic& traffic) const {
  const auto others = [&](std::int64_t bytes) { return bytes / ulysses_ * (ulysses_ - 1); };
  if (ulysses_ > 1) add(traffic, Verb::all_to_all, 2 * others(q_) + others(lse_) + 2 * others(kv_head_), 5);
  if (ring_ == 1) return;
  if (gathers_) {
    add(traffic, Verb::all_gather, (ring_ - 1) * kv_);
    return add(traffic, Verb::reduce_scatter, (ring_ - 1) * kv_);
  }
  add(traffic, Verb::send, 2 * (ring_ - 1) * kv_, 2 * (ring_ - 1));
  add(traffic, Verb::recv, 0, 2 * (ring_ - 1));
}

}  // namespace echelon
