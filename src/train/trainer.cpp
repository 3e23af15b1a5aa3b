#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "parallel/sequence_parallel.h"

namespace echelon {

static double count_targets(const Microbatch& microbatch) {
  const std::int32_t* ids = microbatch.targets.data<std::int32_t>();
  return static_cast<double>(
      std::count_if(ids, ids + microbatch.rows(), [](std::int32_t id) { return id >= 0; }));
}

Trainer::Trainer(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer, std::uint64_t seed,
                 const Faults& faults)
    : rank_(rank),
      plan_(plan),
      optimizer_(optimizer),
      faults_(faults),
      pipeline_(plan),
      lowered_(
          lowered_schedule(plan, static_cast<int>(microbatches(plan, rank.coordinate(Axis::dp)).size()))),
      parameters_(rank, plan, pipeline_, seed),
      stages_(rank_, plan_, pipeline_, parameters_, faults) {}

Microbatch Trainer::load(std::int64_t step, Range samples, const SampleSource& source) {
  Microbatch microbatch;
  microbatch.batch = samples.size();
  microbatch.seq_len = plan_.seq_len;
  microbatch.tokens = Tensor(rank_.arena(), MemoryCategory::activations, DType::i32, {microbatch.rows()});
  microbatch.targets = Tensor(rank_.arena(), MemoryCategory::activations, DType::i32, {microbatch.rows()});
  for (std::int64_t i = 0; i < samples.size(); ++i)
    source(step, samples.begin + i, microbatch.tokens.data<std::int32_t>() + i * plan_.seq_len,
           microbatch.targets.data<std::int32_t>() + i * plan_.seq_len);
  return microbatch;
}

// Ranks that share a key/value head each saw their own query heads only, so its gradient is the sum over
// them.
void Trainer::finish_group(int group, DataParallel& data_parallel) {
  const int tp = rank_.size(Axis::tp);
  for (const Parameter& p : parameters_.all()) {
    const int replicas = tp_replicas(p.spec, tp);
    if (p.group == group && p.spec.shard_dim >= 0 && replicas > 1)
      rank_.tp_replicas(replicas).all_reduce(p.gradient).wait();
  }
  data_parallel.ready(parameters_.layout().cut_ranges[static_cast<std::size_t>(group)]);
}

// A parameter that two pipeline ranks hold (both ends of a tied embedding, both copies of a DualPipe stage)
// has a part of its gradient on each. Each rank adds the other's part to its own; a sum of two has one order.
void Trainer::add_pipeline_copies() {
  Communicator& group = rank_.along(Axis::pp);
  for (const ParamSpec& spec : parameters_.model()) {
    const Parameter* p = parameters_.find_here(spec.name);
    if (p == nullptr || p->holders.size() < 2) continue;
    check(p->holders.size() == 2, "a parameter is on at most two pipeline ranks");
    const int other = p->holders[p->holders.front() == group.rank() ? 1 : 0];
    const Tensor theirs(rank_.arena(), MemoryCategory::communication, rank_.dtype(), p->gradient.shape());
    Pending sent = group.send(p->gradient, other);
    group.recv(theirs, other).wait();
    sent.wait();
    rank_.kernels().add(theirs, p->gradient);
  }
}

double Trainer::compute_gradients(std::int64_t step, const SampleSource& samples) {
  parameters_.clear_gradients(rank_.kernels());
  const std::int64_t bucket_elements = default_bucket_bytes / element_bytes(rank_.dtype());
  DataParallel data_parallel(rank_, parameters_.gradients(),
                             gradient_buckets(parameters_.layout(), bucket_elements));
  // All microbatches are loaded first: the loss is the mean over the targets of the global batch that are not
  // ignored, whatever the mesh or padding, so their number must be known before the first gradient.
  std::vector<Microbatch> loaded;
  double num_targets = 0;
  for (const Range& range : microbatches(plan_, rank_.coordinate(Axis::dp))) {
    loaded.push_back(load(step, range, samples));
    num_targets += count_targets(loaded.back());
  }
  num_targets = sum_over({Axis::dp}, {num_targets})[0];
  if (num_targets == 0) fail("step {}: the batch has no target tokens", step + 1);

  // Groups with a parameter whose gradient is complete only after the pipeline has been emptied.
  std::set<int> late;
  const bool ties_here = pipeline_.ties_on(rank_.coordinate(Axis::pp));
  for (const Parameter& p : parameters_.all())
    if (p.holders.size() > 1 || (ties_here && p.spec.name == parameters_.model().front().name))
      late.insert(p.group);
  HeldStages::StepResult result =
      stages_.run_step(lowered_, loaded, faults_.loss_scale / num_targets, [&](int group) {
        if (!late.contains(group)) finish_group(group, data_parallel);
      });
  loaded.clear();
  parameters_.add_tied_gradient(rank_.kernels());
  add_pipeline_copies();
  for (int group : late) finish_group(group, data_parallel);
  const Range whole = parameters_.layout().whole_range;
  if (plan_.shards_sequence() && !faults_.forget_norm_reduction)
    reduce_sequence_sharded_gradients(rank_, parameters_.gradients().flat_range(whole.begin, whole.end));
  data_parallel.finish();
  last_run_ = std::move(result.run);
  return sum_over({Axis::dp, Axis::pp}, {result.loss_sum})[0] / num_targets;
}

// All ranks agree on the first tensor, so that whichever is heard names the same one.
void Trainer::refuse_step(std::int64_t step, double learning_rate) const {
  const auto& all = parameters_.model();
  std::size_t first = 0;
  const auto finite = [&](const ParamSpec& spec) {
    const Parameter* p = parameters_.find_here(spec.name);
    return p == nullptr || rank_.kernels().all_finite(p->gradient);
  };
  while (first < all.size() && finite(all[first])) ++first;
  const Tensor left(rank_.arena(), MemoryCategory::other, DType::f64, {1});
  *left.data<double>() = static_cast<double>(all.size() - first);
  for (Axis axis : all_axes) rank_.along(axis).all_reduce(left, ReduceOp::max).wait();
  const std::size_t named = all.size() - static_cast<std::size_t>(*left.data<double>());
  fail("step {}: {} (learning rate {}); nothing was updated", step + 1,
       named < all.size() ? "the gradient of " + all[named].name + " is not finite"
                          : std::string("the gradient norm overflows"),
       learning_rate);
}

Trainer::Applied Trainer::apply_gradients(std::int64_t step) {
  Applied applied;
  applied.gradient_norm = global_gradient_norm(rank_, parameters_);
  applied.learning_rate = learning_rate(optimizer_, step);
  if (!std::isfinite(applied.gradient_norm)) refuse_step(step, applied.learning_rate);
  adamw_step(rank_, parameters_, optimizer_, step, clip_factor(applied.gradient_norm, optimizer_.clip));
  return applied;
}

double Trainer::evaluate(std::int64_t num_samples, const SampleSource& samples) {
  const Range mine = split_range(num_samples, rank_.size(Axis::dp), rank_.coordinate(Axis::dp));
  // As many sequences at once as training has, so that evaluation needs no more memory.
  const std::int64_t at_once = microbatches(plan_, rank_.coordinate(Axis::dp)).front().size();
  double loss_sum = 0, num_targets = 0;
  for (std::int64_t begin = mine.begin; begin < mine.end; begin += at_once) {
    const Microbatch microbatch = load(0, {begin, std::min(begin + at_once, mine.end)}, samples);
    num_targets += count_targets(microbatch);
    loss_sum += stages_.evaluate(microbatch);
  }
  num_targets = sum_over({Axis::dp}, {num_targets})[0];
  return sum_over({Axis::dp, Axis::pp}, {loss_sum})[0] / num_targets;
}

std::vector<double> Trainer::sum_over(std::initializer_list<Axis> axes,
                                      const std::vector<double>& values) const {
  const Tensor sums(rank_.arena(), MemoryCategory::other, DType::f64,
                    {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), sums.data<double>());
  for (Axis axis : axes) rank_.along(axis).all_reduce(sums).wait();
  return {sums.data<double>(), sums.data<double>() + sums.numel()};
}

}  // namespace echelon
