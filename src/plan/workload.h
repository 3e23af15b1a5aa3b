// What is planned for, and how the training program carries out a plan.
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
  Plan plan;  // model, batch and lengths, and other given fields: every plan of the search has them
  Precision precision = Precision::bf16;
  Machine machine;
  Software software;
  ExactMemory exact_memory = {};  // exact_memory() of train/dry_run.h, if the software is this trainer
  ExpertSkew expert_load = {};
  DocumentLengths documents = {};  // of documents packed into sequences, under a document mask
  // How often a token goes through final norm, output layer and loss: more than once if modules after the
  // model predict further tokens. Their layers then count among the model's.
  double output_passes = 1;
  // In 8 and 4 bits, products that stay in 16: those of these ops in all layers, and all products of the last
  // `wide_layers` layers, which are priced as if they were spread evenly over their kinds.
  std::vector<std::string> wide_ops = {};
  std::int64_t wide_layers = 0;
  bool dynamic_context = false;    // each document is on as many ranks as its length needs
};

Runner runner_of(const Software& software);

// The recipe with which this repository's trainer runs what is priced in `precision`. It has no products
// narrower than fp8, and runs those in bf16.
const PrecisionRecipe& trained_recipe(Precision precision);

// Microbatches of a step on one data-parallel rank.
std::int64_t num_microbatches(const Plan& plan);

// How the program sums gradients over the ranks that share them. From ZeRO 2 on, it sums after each
// microbatch and keeps its shard; or it keeps whole gradients until the last microbatch and sums once; or, in
// interleaved pipelines, it sums after each group of microbatches, stage by stage. Memory, traffic and time
// are all counted by this choice.
struct GradientSums {
  bool each_microbatch = false;
  bool keeps_shards = false;  // between microbatches
  std::int64_t groups = 0;    // sums of each stage in a step, if there is one after each group
  bool operator==(const GradientSums&) const = default;
};
GradientSums gradient_sums(const Software& software, const Plan& plan);

// Whether the program runs this ZeRO stage together with the mesh's pipeline and tensor parallelism.
bool runs_zero(const Software& software, int zero, const Mesh& mesh);

// Whether the program has context parallelism in the precision of the work's products.
bool has_context(const Workload& work);

// Whether the program can cut sequences of this length over Ulysses ranks, if the plan has such;
// shape_refusal() decides for other kinds.
bool cuts_sequences(const Software& software, const Plan& plan);

// Whether ZeRO 3 gathers parameters for each microbatch's passes; otherwise once per step, and they stay
// whole.
bool gathers_each_microbatch(const Software& software, const Plan& plan);

// Microbatches that the program's interleaved pipeline cannot take: "47 microbatches interleaved over pp 4".
// Empty if it can, and for other schedules.
std::string rest_of_groups(const Software& software, const Plan& plan);

// What of a plan the program does not run: "schedule zb-v", "ZeRO 2". It is priced anyway, as if the program
// had it.
std::vector<std::string> not_run(const Workload& work, const Plan& plan);

// Whether cp ranks cut each packed document separately: then --cp-balance has no effect.
bool cuts_each_document(const Workload& work);
// Says so: "with --dynamic-cp, under which each document is cut by itself".
std::string what_cuts_documents(const Software& software, bool dynamic_context);

// Why the program cannot keep this on the machine's hosts; empty if it can.
std::string no_host(const Workload& work, const Plan& plan);
// Whether the program offloads activations together with this recomputation.
bool offloads_beside(const Software& software, const PipelineRecompute& recompute);

// "dp 4 tp 8 pp 2, 1f1b, micro-batch 1, ZeRO 1, recompute selective"
std::string summary(const Plan& plan);

// Why these sizes are inconsistent, in one sentence; empty if they are not (shape_refusal()).
std::string shape_problem(const Workload& work, const Plan& plan);

}  // namespace echelon
