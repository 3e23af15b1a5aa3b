#include "train/gradient_completion.h"

#include <cmath>

#include "base/error.h"
#include "comm/host_group.h"
#include "parallel/sequence_parallel.h"

namespace echelon {

GradientCompletion::GradientCompletion(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline,
                                       const ParameterStore& parameters, const Faults& faults)
    : rank_(rank),
      parameters_(parameters),
      shards_sequence_(plan.shards_sequence()),
      faults_(faults),
      reducer_(DataParallel::groups(rank, plan), rank.kernels(), rank.arena(), rank.precision().gradients,
               plan.compression, parameters.seed(), parameters.gradient_buckets()),
      late_groups_(pipeline.late_groups(rank.coordinate(Axis::pp))),
      has_stage_copies_(pipeline.stage_copies() > 1) {}

void GradientCompletion::begin(std::int64_t updates, bool reduces) {
  parameters_.begin_gradients();
  reduction_.emplace(rank_, parameters_.shards(), reducer_, updates,
                     reduces ? parameters_.bucket_tensors() : std::vector<BucketTensors>());
}

void GradientCompletion::group_done(int group) {
  if (!late_groups_.contains(group)) finish_group(group);
}

// Ranks that share a key/value head, or a group of a state space's heads, each saw their own heads only, so
// its gradient is the sum over them.
void GradientCompletion::finish_group(int group) {
  const int tp = rank_.size(Axis::tp);
  if (faults_.narrow_gradients)
    for (const Parameter& p : parameters_.all())
      if (p.group == group && !p.spec.frozen) {
        const Tensor narrow(rank_.arena(), MemoryCategory::other, DType::bf16, p.gradient.shape());
        rank_.kernels().copy(p.gradient, narrow);
        rank_.kernels().copy(narrow, p.gradient);
      }
  for (const Parameter& p : parameters_.all()) {
    const int replicas = tp_replicas(p.spec, tp);
    if (p.group == group && !p.spec.frozen && p.spec.shard_dim >= 0 && replicas > 1)
      rank_.tp_replicas(replicas).all_reduce(p.gradient).wait();
  }
  parameters_.end_gradients(group);
  for (const Range& range : parameters_.gradient_ranges(group)) reduction_->ready(range);
}

void GradientCompletion::finish() {
  const Doing doing = rank_.doing(Activity::reduce_gradients);
  parameters_.need_all_gradients();
  finish_sums();
}

void GradientCompletion::finish_sums() {
  // Every group is finished: what is left is what each tp rank holds whole.
  if (!shards_sequence_)
    reduce_partial_gradients(rank_, parameters_.partial_gradients());
  else if (!faults_.forget_norm_reduction)
    reduce_partial_gradients(rank_, parameters_.whole_gradients());
  parameters_.end_whole_gradients();
  reduction_->finish();
  reduction_.reset();
}

void GradientCompletion::finish_with_pipeline() {
  const Doing doing = rank_.doing(Activity::reduce_gradients);
  parameters_.need_all_gradients();
  // Under invariant numerics the two copies of a DualPipe stage have the halves of a rank's microbatches, so
  // their sum is a node of the tree, and comes before that over ranks.
  const bool by_tree = parameters_.sequence_tree() != nullptr, first = by_tree && has_stage_copies_;
  if (first) add_pipeline_copies(true);
  if (by_tree) sum_ties_first();
  parameters_.add_tied_gradient();
  if (!first) add_pipeline_copies(false);
  for (int group : late_groups_) finish_group(group);
  finish_sums();
}

// Under invariant numerics both parts of a tied table's gradient are summed over the data-parallel ranks
// before one is added to the other, or their grouping would show the ranks. What is summed so is the first
// rank's, and nothing the others': the sum that follows adds zeros, none of them to a zero below zero, as the
// part of the embedding begins as a zero and is added to.
void GradientCompletion::sum_ties_first() {
  Communicator& group = rank_.dp_cp();
  if (group.size() == 1) return;
  const auto sum = [&](const Tensor& part) {
    group.all_reduce(part).wait();
    if (group.rank() > 0) rank_.kernels().fill(part, 0.0);
  };
  for (const Tensor& apart : {parameters_.tied_gradient(), parameters_.next_gradient()})
    if (apart.defined()) sum(apart);
  for (const Parameter* p : parameters_.in_model_order()) {
    if (p->spec.frozen) continue;
    const bool has_both = parameters_.tied_gradient().defined() && p->spec.name == parameters_.shared_name();
    if (has_both || (p->holders.size() > 1 && !has_stage_copies_)) sum(p->gradient);
  }
}

// A parameter that two pipeline ranks hold (both ends of a tied embedding, both copies of a DualPipe stage)
// has a part of its gradient on each. Each rank adds the other's part to its own; a sum of two has one order.
void GradientCompletion::add_pipeline_copies(bool apart) {
  Communicator& group = rank_.along(Axis::pp);
  for (const Parameter* p : parameters_.in_model_order()) {
    if (p->spec.frozen || p->holders.size() < 2) continue;
    check(p->holders.size() == 2, "a parameter is on at most two pipeline ranks");
    const int other = p->holders[p->holders.front() == group.rank() ? 1 : 0];
    const auto add = [&](const Tensor& sum) { add_theirs(sum, other); };
    if (const SequenceTree* tree = parameters_.sequence_tree())
      tree->add_copy(rank_.kernels(), p->gradient, p->waiting, add);
    else
      add(p->gradient);
    if (!apart || p->spec.name != parameters_.shared_name()) continue;
    for (const Tensor& part : {parameters_.tied_gradient(), parameters_.next_gradient()})
      if (part.defined()) add_theirs(part, other);
  }
}

void GradientCompletion::add_theirs(const Tensor& gradient, int other) {
  Communicator& group = rank_.along(Axis::pp);
  const Tensor theirs(rank_.arena(), MemoryCategory::communication, gradient.dtype(), gradient.shape());
  Pending sent = group.send(gradient, other);
  group.recv(theirs, other).wait();
  sent.wait();
  rank_.kernels().add(theirs, gradient);
}

std::string GradientCompletion::first_nonfinite(double loss) const {
  const auto& all = parameters_.model();
  std::size_t first = all.size();
  for (const Parameter* p : parameters_.in_model_order())
    if (!p->spec.frozen && !rank_.kernels().all_finite(p->own_gradient)) {
      first = p->index;
      break;
    }
  auto left = static_cast<double>(all.size() - first);
  for (Axis axis : all_axes) left = HostGroup(rank_.along(axis)).max(left);
  const std::size_t named = all.size() - static_cast<std::size_t>(left);
  if (named < all.size()) return "the gradient of " + all[named].name + " is not finite";
  return std::isfinite(loss) ? "the gradient norm overflows" : "the loss is not finite";
}

}  // namespace echelon
