// What is planned for, and what the program that trains makes of a plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/expert_skew.h"
#include "plan/memory.h"
#include "spec/machine.h"
#include "spec/packed_documents.h"
#include "spec/plan.h"
#include "spec/plan_rules.h"
#include "spec/software.h"

namespace echelon {

struct Workload {
  Plan plan;  // model, batch and lengths, and whatever else is given: each plan of the search is one of it
  Precision precision = Precision::bf16;
  Machine machine;
  Software software;
  ExactMemory exact_memory = {};  // where the software is this repository's trainer
  ExpertSkew expert_load = {};
  DocumentLengths documents = {};  // that sequences are packed of, under a document mask
  // How often a token goes through final norm, output layer and loss: more than once where modules behind the
  // model predict further tokens, whose layers then count among the model's.
  double output_passes = 1;
  // In 8 and 4 bits: products that stay in 16, those of these ops of all layers, and all of so many layers,
  // the last ones, which are priced as if they lay evenly among their kind's.
  std::vector<std::string> wide_ops = {};
  std::int64_t wide_layers = 0;
  bool dynamic_context = false;    // each document is on as many ranks as its length needs
};

Runner runner_of(const Software& software);

// The recipe by which this repository's trainer runs what is priced in `precision`: it has no products
// narrower than fp8, and runs those in bf16.
const PrecisionRecipe& trained_recipe(Precision precision);

// Microbatches of a step on one data-parallel rank.
std::int64_t num_microbatches(const Plan& plan);

// How the program sums gradients over the ranks that share them. From ZeRO 2 on it either sums behind each
// microbatch and keeps its shard, or keeps whole gradients until the last microbatch and sums once, or in
// interleaved pipelines sums behind each group of microbatches, stage by stage: what memory, traffic and time
// count is one of them.
struct GradientSums {
  bool each_microbatch = false;
  bool keeps_shards = false;  // between microbatches
  std::int64_t groups = 0;    // sums of each stage in a step, where there is one behind each group
  bool operator==(const GradientSums&) const = default;
};
GradientSums gradient_sums(const Software& software, const Plan& plan);

// Whether it runs this stage of ZeRO beside the mesh's pipeline and tensor parallelism.
bool runs_zero(const Software& software, int zero, const Mesh& mesh);

// Whether it has context parallelism in what the work is multiplied in.
bool has_context(const Workload& work);

// Whether it cuts sequences of this length over the ranks of Ulysses, where the plan has such; of other kinds
// shape_refusal() says so.
bool cuts_sequences(const Software& software, const Plan& plan);

// Whether ZeRO 3 gathers parameters for each microbatch's passes; else once a step, and they stay whole.
bool gathers_each_microbatch(const Software& software, const Plan& plan);

// Microbatches that an interleaved pipeline of the program cannot take: "47 microbatches interleaved over
// pp 4". Empty where it can, and of other schedules.
std::string rest_of_groups(const Software& software, const Plan& plan);

// What of a plan the program does not run: "schedule zb-v", "ZeRO 2". It is priced all the same, as if the
// program had it.
std::vector<std::string> not_run(const Workload& work, const Plan& plan);

// Whether the ranks of cp cut each packed document by itself: no --cp-balance acts then.
bool cuts_each_document(const Workload& work);
// Then says so: "with --dynamic-cp, under which each document is cut by itself".
std::string what_cuts_documents(const Software& software, bool dynamic_context);

// Why the program does not keep this on the machine's hosts; empty where it can.
std::string no_host(const Workload& work, const Plan& plan);
// Whether it offloads activations beside this recomputation.
bool offloads_beside(const Software& software, const PipelineRecompute& recompute);

// "dp 4 tp 8 pp 2, 1f1b, micro-batch 1, ZeRO 1, recompute selective"
std::string summary(const Plan& plan);

// Why these sizes do not go together, as one sentence; empty where they do (shape_refusal()).
std::string shape_problem(const Workload& work, const Plan& plan);

}  // namespace echelon
