// One point of the planner's search space, and what it is a configuration of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "spec/machine.h"
#include "spec/model_spec.h"
#include "spec/plan.h"
#include "spec/plan_rules.h"
#include "spec/software.h"

namespace echelon {

struct Workload {
  ModelSpec model;
  std::int64_t seq_len = 1, global_batch = 1;  // tokens; sequences of a step
  Precision precision = Precision::bf16;
  Machine machine;
  Software software;
  ExactMemory exact_memory = {};  // where the software is this repository's trainer
};

struct Configuration {
  int dp = 1, tp = 1, pp = 1, cp = 1;
  int ep = 1;                     // expert groups, laid over dp x cp
  int etp = 1;                    // cut of each expert, of the tp ranks
  bool sequence_parallel = true;  // where tp > 1
  ContextKind context = ContextKind::ring;
  int zero = 0, hsdp = 1;
  std::string schedule = "1f1b";
  int chunks = 1;  // model chunks of a pipeline rank
  std::int64_t micro_batch = 1;
  Recompute recompute;
  std::vector<std::int64_t> layers_per_stage;  // empty: balanced by cost, embedding and output layer included
  bool even_split = false;                     // empty layers_per_stage: the even split instead
  bool operator==(const Configuration&) const = default;

  int ranks() const { return dp * tp * pp * cp; }
  bool shards_sequence() const { return sequence_parallel && tp > 1; }
  int shards() const { return zero == 0 ? 1 : dp * cp / hsdp; }
};

// Microbatches of a step on one data-parallel rank.
std::int64_t num_microbatches(const Workload& work, const Configuration& c);

// How the program sums gradients over the ranks that share them. From ZeRO 2 on it either sums behind each
// microbatch and keeps its shard, or keeps whole gradients until the last microbatch and sums once: what
// memory, traffic and time count is one or the other.
struct GradientSums {
  bool each_microbatch = false;
  bool keeps_shards = false;  // between microbatches
};
GradientSums gradient_sums(const Workload& work, const Configuration& c);

// What of a configuration the program does not run: "schedule zb-v", "ZeRO 2". It is priced all the same, as
// if the program had it.
std::vector<std::string> not_run(const Software& software, const Configuration& c);

// The configuration's part of a plan of the workload, which is what the rules of spec/plan_rules judge.
Plan plan_of(const Workload& work);
void place(const Workload& work, const Configuration& c, Plan& plan);
Runner runner_of(const Workload& work);

// What train and verify take; `layers` of each stage. Their precision is f32.
Plan as_plan(const Workload& work, const Configuration& c, const std::vector<std::int64_t>& layers);

// "dp 4 tp 8 pp 2, 1f1b, micro-batch 1, ZeRO 1, recompute selective"
std::string describe(const Configuration& c);

// Why these sizes do not go together, as one sentence; empty where they do (shape_refusal()).
std::string shape_problem(const Workload& work, const Configuration& c);

}  // namespace echelon
