#include "model/held_stages.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "schedule/group_uses.h"
#include "tensor/host.h"

namespace echelon {
HeldStages::HeldStages(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline,
                       const ParameterStore& parameters, const Faults& faults)
    : rank_(&rank),
      window_(plan.model.window.size),
      parameters_(&parameters),
      hidden_(plan.model.hidden),
      tensor_parallel_(rank, plan.sequence_parallel),
      ids_(pipeline.stages_of(rank.coordinate(Axis::pp))),
      has_last_stage_(pipeline.ends_on(rank.coordinate(Axis::pp))) {
  if (plan.cuts_vocabulary()) vocabulary_part_.emplace(rank, plan, parameters.output_weights());
  if (plan.offloads_activations()) offloaded_ = std::make_shared<OffloadedActivations>(rank, plan);
  for (int id : ids_)
    held_.emplace_back(rank, plan, parameters, pipeline.slices()[static_cast<std::size_t>(id)],
                       pipeline.first_group(rank.coordinate(Axis::pp), id), faults, offloaded_);
  for (const Stage& stage : held_)
    for (const Stage::Mixture& m : stage.mixtures()) mixtures_.push_back(m);
  for (int s = 0; s < static_cast<int>(pipeline.slices().size()); ++s)
    for (int r = 0; r < rank.size(Axis::pp) && static_cast<int>(runner_.size()) == s; ++r) {
      const std::vector<int>& stages = pipeline.stages_of(r);
      if (std::find(stages.begin(), stages.end(), s) != stages.end()) runner_.push_back(r);
    }
  const int pp_rank = rank.coordinate(Axis::pp);
  for (int s = 0; s < static_cast<int>(runner_.size()); ++s) {
    if (runner_[static_cast<std::size_t>(s)] != pp_rank) continue;
    const StageGroups groups = stage_groups(pipeline, pp_rank, s);
    for (int group = groups.first; group < groups.end; ++group) forward_uses_.push_back(group);
    if (groups.output >= 0) forward_uses_.push_back(groups.output);
  }
  if (vocabulary_part_) forward_uses_.push_back(parameters.output_group());
}

Tensor HeldStages::make_boundary(std::int64_t rows) const {
  return rank_->activation({tensor_parallel_.rows_here(rows).size(), hidden_});
}

const Stage& HeldStages::stage(int id) const {
  const auto found = std::find(ids_.begin(), ids_.end(), id);
  check(found != ids_.end(), "a rank runs the stages that it holds");
  return held_[static_cast<std::size_t>(found - ids_.begin())];
}

Tensor HeldStages::pass(const Microbatch& microbatch, std::int64_t position, const Caches& caches) const {
  parameters_->begin_uses(forward_uses_);
  Communicator& group = rank_->along(Axis::pp);
  Tensor x;
  for (std::size_t s = 0; s < runner_.size(); ++s) {
    if (runner_[s] != group.rank()) continue;
    if (s > 0 && runner_[s - 1] != group.rank()) {
      x = make_boundary(microbatch.rows());
      group.recv(x, runner_[s - 1]).wait();
    }
    const auto held =
        static_cast<std::size_t>(std::find(ids_.begin(), ids_.end(), static_cast<int>(s)) - ids_.begin());
    x = held_[held].evaluate(microbatch, std::move(x), position,
                             caches.empty() ? std::vector<BlockCache>() : caches[held]);
    if (s + 1 < runner_.size() && runner_[s + 1] != group.rank())
      group.send(std::exchange(x, {}), runner_[s + 1]).wait();
  }
  if (vocabulary_part_) {
    const auto used = parameters_->use(parameters_->output_group());
    if (!has_last_stage()) x = make_boundary(microbatch.rows());
    const std::vector<Range> runs = SequenceSums(parameters_->sequence_tree(), rank_->kernels(), 0,
                                                 microbatch.sequences.batch, microbatch.rows())
                                        .runs();
    x = microbatch.targets.defined() ? vocabulary_part_->loss(x, microbatch.targets, last_rank(), runs)
                                     : vocabulary_part_->logits(x, last_rank());
    if (!has_last_stage()) x = {};
  }
  parameters_->end_uses();
  return x;
}

double HeldStages::evaluate(const Microbatch& microbatch) const {
  const Tensor loss = pass(microbatch, 0, {});
  return loss.defined() ? copy_to_host(loss, 0.0).front() : 0.0;
}

void HeldStages::begin_step() const {
  for (const Stage::Mixture& m : mixtures_) m.experts->begin_step();
}

std::vector<RoutingCounts> HeldStages::take_routing_counts() const {
  std::vector<RoutingCounts> counts;
  for (const Stage::Mixture& m : mixtures_) {
    counts.push_back(m.experts->take_counts());
    counts.back().layer = m.layer;
  }
  return counts;
}

MovedCopies HeldStages::take_moved_copies() const {
  MovedCopies moved;
  for (const Stage::Mixture& m : mixtures_) moved += m.experts->take_moved();
  return moved;
}

void HeldStages::balance_routers(const std::vector<RoutingCounts>& counts) const {
  for (const RoutingCounts& c : counts)
    for (const Stage::Mixture& m : mixtures_)
      if (m.layer == c.layer) m.experts->balance(c.routed);
}

RouterBiases HeldStages::router_biases() const {
  RouterBiases biases;
  for (const Stage::Mixture& m : mixtures_)
    if (!m.experts->bias().empty()) biases[m.layer] = m.experts->bias();
  return biases;
}

void HeldStages::set_router_biases(const RouterBiases& biases) const {
  for (const Stage::Mixture& m : mixtures_)
    if (const auto found = biases.find(m.layer); found != biases.end()) m.experts->set_bias(found->second);
}

void HeldStages::watch_routing(RoutingWatch* watch) const {
  for (const Stage::Mixture& m : mixtures_) m.experts->watch_routing(m.layer, watch);
}

HeldStages::Caches HeldStages::make_caches(std::int64_t max_positions) const {
  Caches caches;
  for (const Stage& stage : held_) caches.push_back(stage.make_caches(max_positions));
  return caches;
}

Tensor HeldStages::next_logits(const Tensor& tokens, std::int64_t position, const Caches& caches) const {
  Microbatch placed;
  placed.tokens = tokens;
  placed.positions = Tensor(rank_->arena(), MemoryCategory::activations, DType::i32, {tokens.numel()});
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens.numel()));
  std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(position));
  copy_from_host<std::int32_t>(positions, placed.positions);
  if (window_ > 0) {
    placed.window_starts = Tensor(rank_->arena(), MemoryCategory::activations, DType::i32, {tokens.numel()});
    for (std::int32_t& place : positions) place = first_in_window(place, window_);
    copy_from_host<std::int32_t>(positions, placed.window_starts);
  }
  return pass(placed, position, caches);
}

}  // namespace echelon
