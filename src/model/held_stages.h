// The pipeline stages of one rank, and the plain pass from stage to stage that evaluation and generation use.
#pragma once

#include <optional>
#include <vector>

#include "model/stage.h"
#include "parallel/vocabulary_parallel.h"
#include "schedule/pipeline_layout.h"
#include "spec/routing_balance.h"

namespace echelon {

class HeldStages {
 public:
  // `parameters` outlive this.
  HeldStages(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline,
             const ParameterStore& parameters, const Faults& faults);

  const Rank& rank() const { return *rank_; }
  bool has_last_stage() const { return has_last_stage_; }
  const Stage& stage(int id) const;  // one of those that this rank holds
  // This rank's part of the output layer, under vocabulary parallelism; else nullptr.
  const VocabularyParallel* vocabulary_part() const {
    return vocabulary_part_ ? &*vocabulary_part_ : nullptr;
  }
  // Allocates the residual stream of `rows` rows, as it lies between two stages.
  Tensor make_boundary(std::int64_t rows) const;

  // Bytes of offloaded activations since the last call.
  HostActivations take_offloaded() const { return offloaded_ ? offloaded_->take_moved() : HostActivations(); }

  // For this rank's layers with experts, stage by stage.
  void begin_step() const;  // of training
  std::vector<RoutingCounts> take_routing_counts() const;
  MovedCopies take_moved_copies() const;
  void balance_routers(const std::vector<RoutingCounts>& counts) const;
  RouterBiases router_biases() const;
  void watch_routing(RoutingWatch* watch) const;             // in all layers; `watch` outlives this
  void set_router_biases(const RouterBiases& biases) const;  // ignores layers of other ranks

  // The summed loss of a microbatch, on the ranks that hold the last stage; 0 elsewhere. Collective over pp.
  double evaluate(const Microbatch& microbatch) const;

  // Logits (V) after the last of the new tokens at [position, ...), on the rank that holds the last stage;
  // undefined elsewhere. Collective over pp.
  using Caches = std::vector<std::vector<BlockCache>>;
  Caches make_caches(std::int64_t max_positions) const;
  Tensor next_logits(const Tensor& tokens, std::int64_t position, const Caches& caches) const;
  // The pipeline rank that holds the last stage, and runs it in evaluation and generation.
  int last_rank() const { return runner_.back(); }

 private:
  // Passes the residual stream through all stages, from rank to rank. Returns the last stage's result, on its
  // rank.
  Tensor pass(const Microbatch& microbatch, std::int64_t position, const Caches& caches) const;

  const Rank* rank_;
  std::int64_t window_ = 0;  // the model's
  const ParameterStore* parameters_;
  std::int64_t hidden_;
  TensorParallel tensor_parallel_;
  std::optional<VocabularyParallel> vocabulary_part_;
  std::shared_ptr<const OffloadedActivations> offloaded_;
  std::vector<int> ids_;  // of the stages here
  bool has_last_stage_;
  std::vector<Stage> held_;  // in the order of ids_
  std::vector<Stage::Mixture> mixtures_;
  std::vector<int> forward_uses_;  // layer groups that pass() reads, in order
  std::vector<int> runner_;        // by stage of the model: the rank that runs it in pass()
};

}  // namespace echelon
