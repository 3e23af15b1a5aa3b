#include "plan/expert_costs.h"

namespace echelon {

ExpertCosts::ExpertCosts(const Plan& plan, std::int64_t sequences, const Coordinates& at)
    : shards_sequence_(plan.shards_sequence()),
      tp_(plan.mesh.size(Axis::tp)),
      cp_(plan.mesh.size(Axis::cp)),
      ep_(plan.mesh.ep),
      tp_rank_(at.tp),
      cp_rank_(at.cp),
      rows_(sequences * plan.tokens_here()),
      k_(plan.model.experts_per_token),
      element_(element_bytes(plan.dtype)),
      shared_(plan.model.num_shared_experts > 0),
      experts_(plan.model.num_experts) {
  constexpr std::int64_t integer = 4;
  const ModelSpec& m = plan.model;
  const std::int64_t here = shards_sequence_ ? split_range(rows_, tp_, at.tp).size() : rows_;
  const std::int64_t room = m.experts == Experts::none ? 0 : room_for_copies(plan, sequences),
                     received = m.experts == Experts::none ? 0 : room_for_received(plan, sequences);
  const std::int64_t F = split_range(m.expert_hidden, tp_, at.tp).size(),
                     shared = split_range(m.num_shared_experts * m.expert_hidden, tp_, at.tp).size();
  logits_ = here * m.num_experts * element_;
  choices_here_ = here * k_ * (integer + element_);
  choices_ = rows_ * k_ * (integer + element_);
  places_ = (rows_ * k_ + room) * integer;
  kept_ = plan.balancing.capacity > 0 ? rows_ * k_ * integer : 0;
  gathers_choices_ = kept_ > 0 && cp_ > 1;
  copies_ = room * m.hidden * element_;
  whole_ = rows_ * m.hidden * element_;
  here_ = here * m.hidden * element_;
  activated_ = received * F * element_;
  taken_ = received * m.hidden * element_;
  by_row_ = received * element_;
  indices_ = exchanges() ? 2 * received * integer : 0;
  away_ = room - room / ep_;
  hidden_ = 2 * activated_;
  shared_activated_ = rows_ * shared * element_;
  shared_hidden_ = 2 * shared_activated_;
  by_place_ = room * element_;
  d_weights_ = rows_ * k_ * element_;
  d_weights_here_ = here * k_ * element_;
  const std::int64_t scopes = plan.balancing.scope == BalanceScope::sequence ? sequences : 1;
  const bool each = plan.balancing.has_counts() && plan.balancing.scope != BalanceScope::batch;
  counts_ = each ? scopes * (m.num_experts + m.router.groups) : 0;
  told_ = (m.num_experts + scopes * (m.num_experts + m.router.groups)) * integer;
}

void ExpertCosts::route(Account& a) const {
  a.allocate(logits_);
  a.allocate(choices_here_);
  if (shards_sequence_) {
    const std::int64_t packed = 2 * d_weights_here_, all = 2 * d_weights_;
    a.allocate(packed);
    a.allocate(all);
    a.free(packed);
    // Ids, then weights, each in the place of those that were here.
    const std::int64_t ids = choices_ - d_weights_, ids_here = choices_here_ - d_weights_here_;
    a.allocate(ids);
    a.free(ids_here);
    a.allocate(d_weights_);
    a.free(d_weights_here_ + all);
  }
  a.allocate(places_);
  if (gathers_choices_) {
    const std::int64_t packed = 2 * d_weights_;
    a.allocate(cp_ * choices_);
    a.allocate(packed + cp_ * packed);
    a.free(packed + cp_ * packed);
    a.allocate(cp_ * kept_ + kept_);
    a.free(cp_ * kept_ + cp_ * choices_);
  } else {
    a.allocate(kept_);
  }
  a.allocate(told_);
  a.free(told_ + kept_);
  a.allocate(indices_);
}

void ExpertCosts::dispatch(Account& a, std::int64_t copies, std::int64_t rows, Way way) const {
  if (!exchanges()) return;
  a.allocate(rows);
  if (way == Way::pauses) a.pause();
  a.free(copies);
  a.allocate(rows);
  a.free(rows);
}

void ExpertCosts::combine(Account& a, std::int64_t copies, std::int64_t rows, Way way) const {
  if (!exchanges()) return;
  a.allocate(rows);
  a.free(rows);
  a.allocate(copies);
  if (way == Way::pauses) a.pause();
  a.free(rows);
}

void ExpertCosts::in_forward(Account& a) const {
  a.allocate(copies_);
  if (exchanges()) {  // the shared expert in the middle of dispatch()
    a.allocate(taken_ + shared_hidden_);
    a.pause();
    a.free(copies_);
    a.allocate(taken_);
    a.free(taken_);
  } else {
    a.allocate(shared_hidden_);
  }
  a.allocate(hidden_);
  if (!exchanges()) a.free(copies_);
}

void ExpertCosts::out_forward(Account& a) const {
  a.allocate(whole_ + taken_ + activated_);
  a.free(activated_);
  combine(a, copies_, taken_, Way::pauses);
  a.free(copies_);
  if (!shared()) return;
  a.allocate(shared_activated_ + whole_);
  a.free(shared_activated_ + whole_);
}

void ExpertCosts::backward_input(Account& a, bool keep) const {
  a.allocate(d_weights_ + whole_ + copies_);
  dispatch(a, copies_, taken_, Way::pauses);
  a.allocate(activated_);
  a.allocate(by_place_);
  dispatch(a, by_place_, by_row_, Way::waits);
  a.allocate(by_row_);
  a.free(by_row_);
  combine(a, by_place_, by_row_, Way::waits);
  a.free(by_place_);
  if (!keep) a.free(taken_ + activated_);
  a.allocate(taken_);
  combine(a, copies_, taken_, Way::pauses);
  a.free(copies_);
  if (!shared()) return;
  a.allocate(shared_activated_);
  if (!keep) a.free(shared_activated_);
}

void ExpertCosts::in_backward_weight(Account& a, bool keep) const {
  if (keep) return;
  const std::int64_t gathered = gathers_input() ? whole_ : 0;
  // Experts that are all here ask for it; else the shared one does, when what the others got is gone.
  if (exchanges()) a.free(taken_ + hidden_);
  a.allocate(gathered);
  if (!exchanges()) {
    a.allocate(copies_);
    a.free(taken_ + hidden_);
  }
  a.free(gathered + shared_hidden_);
}

void ExpertCosts::route_backward(Account& a, bool keep) const {
  if (shards_sequence_) {
    a.allocate(d_weights_here_);
    a.free(d_weights_);
  }
  a.allocate(logits_);  // their gradient
  // The hidden values that forward kept are gone, or wait for the weights' gradients.
  a.free(logits_ + choices_ + indices_ + (keep && !exchanges() ? places_ - copies_list() : places_));
  if (!keep) a.free(logits_);
  a.free(shards_sequence_ ? d_weights_here_ : d_weights_);
}

void ExpertCosts::backward_weight(Account& a) const {
  a.free(taken_ + activated_);
  if (shared()) a.free(shared_activated_ + whole_);
  const std::int64_t gathered = gathers_input() ? whole_ : 0;
  if (exchanges()) a.free(taken_ + hidden_);
  a.allocate(gathered);
  if (!exchanges()) {
    a.allocate(copies_);
    a.free(copies_list() + taken_ + hidden_);
  }
  a.free(gathered + shared_hidden_);
  a.free(logits_ + here_);
}

void ExpertCosts::add_forward_traffic(Traffic& traffic, bool whole) const {
  if (exchanges()) {  // who gets how many, the copies, and the rows back
    traffic.at(Axis::ep, Verb::all_to_all).calls += whole ? 3 : 2;
    traffic.at(Axis::ep, Verb::all_to_all).bytes += (experts_ - experts_ / ep_) * 4;
  }
  if (gathers_choices_) {
    traffic.at(Axis::cp, Verb::all_gather).calls += 1;
    traffic.at(Axis::cp, Verb::all_gather).bytes += (cp_ - 1) * rows_ * 2 * k_ * element_;
  }
  if (!shards_sequence_) return;
  std::vector<std::int64_t> parts;
  for (int i = 0; i < tp_; ++i) parts.push_back(split_range(rows_, tp_, i).size() * 2 * k_);
  traffic.at(Axis::tp, Verb::all_gather).calls += 1;
  traffic.at(Axis::tp, Verb::all_gather).bytes += bytes_sent(Verb::all_gather, parts, tp_rank_, element_);
}

void ExpertCosts::add_backward_traffic(Traffic& traffic) const {
  // Gradients of sums and weights of copies there, those of weights and of rows back.
  if (exchanges()) traffic.at(Axis::ep, Verb::all_to_all).calls += 4;
  if (shards_sequence_) {
    std::vector<std::int64_t> parts;
    for (int i = 0; i < tp_; ++i) parts.push_back(split_range(rows_, tp_, i).size() * k_);
    traffic.at(Axis::tp, Verb::reduce_scatter).calls += 1;
    traffic.at(Axis::tp, Verb::reduce_scatter).bytes +=
        bytes_sent(Verb::reduce_scatter, parts, tp_rank_, element_);
  } else if (tp_ > 1) {
    traffic.at(Axis::tp, Verb::all_reduce).calls += 1;
    traffic.at(Axis::tp, Verb::all_reduce).bytes +=
        all_reduce_bytes_sent(rows_ * k_, tp_, tp_rank_, element_);
  }
  if (cp_ == 1 || counts_ == 0) return;
  traffic.at(Axis::cp, Verb::all_reduce).calls += 1;
  traffic.at(Axis::cp, Verb::all_reduce).bytes += all_reduce_bytes_sent(counts_, cp_, cp_rank_, 8);
}

}  // namespace echelon
